"""Two stages, each on a rank of its own. The document writes ``flow,matmul`` in the last product. Two processes."""

from workbench import flow

P0 = flow.placement(type="cuda", ranks=[0])
P1 = flow.placement(type="cuda", ranks=[1])
BROADCAST = flow.sbp.broadcast

# the first stage of the model lies on device 0
w0 = flow.randn(5, 8, placement=P0, sbp=BROADCAST)
# the second stage of the model lies on device 1
w1 = flow.randn(8, 3, placement=P1, sbp=BROADCAST)

# random data as input
x = flow.randn(4, 5)

# to_global puts the data of the first stage on device 0
in_stage0 = x.to_global(placement=P0, sbp=BROADCAST)
out_stage0 = flow.matmul(in_stage0, w0)
print(out_stage0.shape)  # (4, 8)

# to_global puts the data of the second stage on device 1
in_stage1 = out_stage0.to_global(placement=P1, sbp=BROADCAST)
out_stage1 = flow.matmul(in_stage1, w1)
print(out_stage1.shape)  # (4, 3)
