"""Cases of layers and products: matmul family, convolutions, pools, embeddings, attention."""

import torch
import torch.nn.functional as F

from tests.tensors.dispatch.cases import Case


def _case(name, function, *shapes):
    return Case(name, function, shapes)


def _with_ids(high, ids_shape, *shapes):
    def make(generator):
        ids = torch.randint(0, high, ids_shape, generator=generator)
        return [ids, *(torch.randn(shape, generator=generator) for shape in shapes)]

    return make


def _unpool(x):
    pooled, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, indices, 2, output_size=(5, 4))


def _masked(q, k, mask):
    return F.scaled_dot_product_attention(q, k, k, mask, scale=0.5)


def _grouped(q, k):
    return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


CASES = [
    _case("mm thin", torch.mm, (5, 1), (1, 4)),
    _case("addmm scaled", lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=-2), (5, 3), (5, 2), (2, 3)),
    _case("addbmm", lambda c, x, y: torch.addbmm(c, x, y, beta=2), (5, 3), (2, 5, 4), (2, 4, 3)),
    _case("baddbmm", torch.baddbmm, (2, 5, 3), (2, 5, 4), (2, 4, 3)),
    _case("baddbmm row", lambda c, x, y: torch.baddbmm(c, x, y, alpha=3), (3,), (2, 5, 4), (2, 4, 3)),
    _case("addr", lambda c, x, y: torch.addr(c, x, y, beta=0.5), (5, 4), (5,), (4,)),
    _case("addmm in place", lambda c, x, y: (c * 2).addmm_(x, y), (5, 3), (5, 4), (4, 3)),
    _case("inner", torch.inner, (3, 2, 4), (5, 4)),
    _case("matmul many", torch.matmul, (2, 1, 5, 4), (3, 4, 3)),
    _case("tensordot lists", lambda x, y: torch.tensordot(x, y, dims=([0, 2], [1, 0])), (3, 2, 4), (4, 3, 5)),
    _case("einsum diagonal", lambda x: torch.einsum("bii->bi", x), (5, 3, 3)),
    _case("einsum trace", lambda x, y: torch.einsum("ii,ij->j", x, y), (3, 3), (3, 5)),
    _case("einsum dots", lambda x, y: torch.einsum("...ij,...jk->...ik", x, y), (2, 1, 5, 4), (3, 4, 2)),
    _case("einsum capitals", lambda x, y: torch.einsum("Bq,Bk->qk", x, y), (5, 4), (5, 3)),
    _case("einsum sublists", lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]), (5, 4), (4, 3)),
    _case("einsum three", lambda x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z), (5, 2), (2, 4), (4, 3)),
    _case("einsum size one", lambda x, y: torch.einsum("ij,ij->j", x, y), (1, 4), (5, 4)),
    _case("bilinear", lambda x, w, b: F.bilinear(x, x, w, b), (5, 2), (4, 2, 2), (4,)),
    _case("linear vector", F.linear, (4,), (3, 4), (3,)),
    _case("chain_matmul", lambda x, y, z: torch.linalg.multi_dot([x, y, z]), (5, 4), (4, 2), (2,)),
    _case("cdist", torch.cdist, (2, 5, 3), (4, 3)),
    _case("pairwise_distance", lambda x, y: F.pairwise_distance(x, y, keepdim=True), (5, 4), (4,)),
    _case("conv2d thin", F.conv2d, (2, 1, 4, 4), (2, 1, 3, 3), (2,)),
    _case("conv2d unbatched", lambda x, w: F.conv2d(x, w, padding="same"), (4, 5, 5), (3, 4, 3, 3)),
    _case("conv1d depthwise", lambda x, w, b: F.conv1d(x, w, b, groups=5), (2, 5, 7), (5, 1, 3), (5,)),
    _case("conv1d six groups", lambda x, w, b: F.conv1d(x, w, b, groups=6), (2, 12, 5), (18, 2, 3), (18,)),
    _case("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
          (2, 4, 3, 3), (4, 3, 2, 2), (3,)),
    _case("conv_transpose2d groups", lambda x, w: F.conv_transpose2d(x, w, groups=4), (2, 8, 3, 3), (8, 3, 2, 2)),
    _case("unfold patches", lambda x: F.unfold(x, 2), (3, 4, 4, 3)),
    _case("fold", lambda x: F.fold(x, (4, 3), 2), (3, 16, 6)),
    _case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (3, 4, 6)),
    _case("max_pool indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[1], (2, 3, 4, 4)),
    _case("max_unpool", _unpool, (2, 3, 5, 4)),
    Case("embedding padding", lambda i, w: F.embedding(i, w, padding_idx=-3), (), _with_ids(7, (5, 3), (7, 4))),
    Case("embedding few rows", F.embedding, (), _with_ids(2, (5,), (2, 3))),
    Case("embedding by frequency", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), (),
         _with_ids(5, (7,), (5, 3))),
    Case("embedding max_norm", lambda i, w: F.embedding(i, w * 1.0, max_norm=0.5), (), _with_ids(5, (4,), (5, 3))),
    Case("torch.embedding", lambda i, w: torch.embedding(w, i, 2), (), _with_ids(5, (4, 2), (5, 3))),
    Case("embedding_bag", lambda i, w: F.embedding_bag(i, w, mode="sum"), (), _with_ids(7, (5, 3), (7, 4))),
    Case("embedding_bag mean", lambda i, w: F.embedding_bag(i, w, padding_idx=1), (), _with_ids(4, (5, 3), (4, 4))),
    Case("embedding_bag weights", lambda i, w, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p), (),
         _with_ids(7, (5, 3), (7, 4), (5, 3))),
    Case("embedding_bag offsets", lambda i, w: F.embedding_bag(i, w, torch.tensor([0, 3, 3])), (),
         _with_ids(7, (6,), (7, 4))),
    _case("attention rows", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
          (2, 5, 4), (2, 6, 4), (2, 6, 3)),
    _case("attention mask", _masked, (2, 3, 5, 4), (2, 3, 6, 4), (3, 1, 6)),
    _case("attention groups", _grouped, (2, 6, 5, 4), (2, 3, 5, 4)),
    _case("attention one group", _grouped, (2, 4, 5, 4), (2, 1, 5, 4)),
]  # fmt: skip
