"""LeNet in the mirrored view: every device has arrays of its own.

The document shows the config, the head of `train_job` and the loop; the network and the optimizer are completed here.
"""

import numpy as np

import workbench.flow.typing as tp
from workbench import flow

BATCH_SIZE = 100
GPU_NUM = 2
BATCH_SIZE_PER_GPU = int(BATCH_SIZE / GPU_NUM)


def lenet(data, train=False):
    initializer = flow.truncated_normal(0.1)
    conv1 = flow.layers.conv2d(
        data, 32, 5, padding="SAME", activation=flow.nn.relu, name="conv1", kernel_initializer=initializer
    )
    pool1 = flow.nn.max_pool2d(conv1, ksize=2, strides=2, padding="SAME", name="pool1", data_format="NCHW")
    conv2 = flow.layers.conv2d(
        pool1, 64, 5, padding="SAME", activation=flow.nn.relu, name="conv2", kernel_initializer=initializer
    )
    pool2 = flow.nn.max_pool2d(conv2, ksize=2, strides=2, padding="SAME", name="pool2", data_format="NCHW")
    reshape = flow.reshape(pool2, [pool2.shape[0], -1])
    hidden = flow.layers.dense(reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    if train:
        hidden = flow.nn.dropout(hidden, rate=0.5, name="dropout")
    return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="dense2")


func_config = flow.function_config()
func_config.default_logical_view(flow.scope.mirrored_view())


@flow.global_function(type="train", function_config=func_config)
def train_job(
    images: tp.ListNumpy.Placeholder((BATCH_SIZE_PER_GPU, 1, 28, 28), dtype=flow.float),
    labels: tp.ListNumpy.Placeholder((BATCH_SIZE_PER_GPU,), dtype=flow.int32),
) -> tp.ListNumpy:
    logits = lenet(images, train=True)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


if __name__ == "__main__":
    flow.config.gpu_device_num(2)
    (train_images, train_labels), (test_images, test_labels) = flow.data.load_mnist(BATCH_SIZE)

    for epoch in range(1):
        for i, (images, labels) in enumerate(zip(train_images, train_labels)):
            images1 = images[:BATCH_SIZE_PER_GPU]
            images2 = images[BATCH_SIZE_PER_GPU:]
            labels1 = labels[:BATCH_SIZE_PER_GPU]
            labels2 = labels[BATCH_SIZE_PER_GPU:]

            imgs_list = [images1, images2]
            labels_list = [labels1, labels2]

            loss = train_job(imgs_list, labels_list)
            total_loss = np.array([*loss[0], *loss[1]])
            if i % 20 == 0:
                print(total_loss.mean())
