"""A layer's matrix product on one device: the listing that the three others change."""

from workbench import flow

x = flow.randn(4, 5)
w = flow.randn(5, 8)
out = flow.matmul(x, w)
print(out.shape)  # (4, 8)
