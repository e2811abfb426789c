"""A small GPT on 2 stages x 2 data x 2 model parallel = 8 devices, as in the picture of GPT-3 (64 x 6 x 8).

The document shows the picture only; this program is ours. Every stage lies on a grid of its own, one axis for the data
and one for the model; weights have one sbp for each. Eight processes.
"""

from workbench import flow

STAGES, DATA, MODEL = 2, 2, 2
BLOCKS, WIDTH, HEADS, LENGTH, WORDS = 2, 16, 4, 6, 24
BATCH, MICRO_BATCHES, STEPS = 8, 2, 20

split, broadcast = flow.sbp.split, flow.sbp.broadcast
WHOLE = [broadcast, broadcast]  # on the data axis, on the model axis
ROWS = [broadcast, split(0)]  # of a weight (out, in): every rank makes some of the outputs
COLUMNS = [broadcast, split(1)]  # every rank takes some of the inputs; what it makes is a term of a sum
SAMPLES = [split(0), broadcast]


def devices(stage):
    first = stage * DATA * MODEL
    return [[first + data * MODEL + model for model in range(MODEL)] for data in range(DATA)]


PLACEMENTS = [flow.placement("cuda", ranks=devices(stage)) for stage in range(STAGES)]


def weight(num_out, num_in, placement, sbp):
    return flow.nn.Parameter(flow.randn(num_out, num_in, placement=placement, sbp=sbp) * 0.2)


class Attention(flow.nn.Module):
    def __init__(self, placement):
        super().__init__()
        self.query = weight(WIDTH, WIDTH, placement, ROWS)  # the heads of this rank
        self.key = weight(WIDTH, WIDTH, placement, ROWS)
        self.value = weight(WIDTH, WIDTH, placement, ROWS)
        self.out = weight(WIDTH, WIDTH, placement, COLUMNS)

    def heads(self, x, projection):
        return flow.matmul(x, projection.t()).view(x.shape[0], LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x):
        query, key, value = (self.heads(x, projection) for projection in (self.query, self.key, self.value))
        scores = flow.matmul(query, key.transpose(2, 3)) * (WIDTH // HEADS) ** -0.5
        later = flow.ones(LENGTH, LENGTH, dtype=flow.bool, placement=x.placement, sbp=WHOLE).triu(1)
        chosen = flow.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
        seen = flow.matmul(chosen, value).transpose(1, 2).reshape(x.shape[0], LENGTH, WIDTH)
        return flow.matmul(seen, self.out.t()).to_global(sbp=SAMPLES)


class Mlp(flow.nn.Module):
    def __init__(self, placement):
        super().__init__()
        self.up = weight(4 * WIDTH, WIDTH, placement, ROWS)
        self.down = weight(WIDTH, 4 * WIDTH, placement, COLUMNS)
        self.gelu = flow.nn.GELU()

    def forward(self, x):
        return flow.matmul(self.gelu(flow.matmul(x, self.up.t())), self.down.t()).to_global(sbp=SAMPLES)


class Block(flow.nn.Module):
    def __init__(self, placement):
        super().__init__()
        self.norm0 = flow.nn.LayerNorm(WIDTH).to_global(placement, WHOLE)
        self.norm1 = flow.nn.LayerNorm(WIDTH).to_global(placement, WHOLE)
        self.attention, self.mlp = Attention(placement), Mlp(placement)

    def forward(self, x):
        x = x + self.attention(self.norm0(x))
        return x + self.mlp(self.norm1(x))


class Embedding(flow.nn.Module):
    def __init__(self, placement):
        super().__init__()
        self.words = weight(WORDS, WIDTH, placement, ROWS)  # every rank knows some of the words
        self.positions = weight(LENGTH, WIDTH, placement, WHOLE)

    def forward(self, tokens):
        return flow.embedding(self.words, tokens).to_global(sbp=SAMPLES) + self.positions


class Head(flow.nn.Module):
    def __init__(self, placement):
        super().__init__()
        self.norm = flow.nn.LayerNorm(WIDTH).to_global(placement, WHOLE)
        self.words = weight(WORDS, WIDTH, placement, ROWS)

    def forward(self, x):
        return flow.matmul(self.norm(x), self.words.t())  # the scores of this rank's words


class Gpt(flow.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [Embedding, *[Block] * BLOCKS, Head]
        shares = [
            layers[len(layers) * stage // STAGES : len(layers) * (stage + 1) // STAGES] for stage in range(STAGES)
        ]
        self.stages = flow.nn.ModuleList(
            flow.nn.Sequential(*[layer(placement) for layer in share])
            for share, placement in zip(shares, PLACEMENTS, strict=True)
        )

    def forward(self, tokens):
        x = tokens
        for stage, placement in zip(self.stages, PLACEMENTS, strict=True):
            x = stage(x.to_global(placement=placement, sbp=SAMPLES))
        return x


flow.manual_seed(0)
gpt = Gpt()
sgd = flow.optim.SGD(gpt.parameters(), lr=0.2, momentum=0.9)


class GptGraph(flow.nn.Graph):
    def __init__(self):
        super().__init__()
        self.gpt = gpt
        for number, stage in enumerate(self.gpt.stages):
            stage.config.stage_id = number
        self.loss_fn = flow.nn.CrossEntropyLoss()
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)
        self.add_optimizer(sgd)

    def build(self, tokens, targets):
        scores = self.gpt(tokens)
        loss = self.loss_fn(scores.view(-1, WORDS), targets.view(-1))
        loss.backward()
        return loss


graph_gpt = GptGraph()

tokens = flow.randint(0, WORDS, (BATCH, LENGTH), placement=PLACEMENTS[0], sbp=SAMPLES)
targets = tokens.roll(1, dims=1).to_global(placement=PLACEMENTS[-1], sbp=SAMPLES)

losses = []
for step in range(STEPS):
    losses.append(graph_gpt(tokens, targets).item())
print(losses[0], losses[-1])
