"""The program of seed 000 as it stands there, after the one import that gives ``Cell`` the method."""

# ruff: noqa
# fmt: off
# pyright: basic, reportAttributeAccessIssue=false
import tenterhook.mindspore

import mindspore.nn as nn
import mindspore as ms
from mindspore import load_param_into_net

# 定义模型结构
class Net(nn.Cell):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 32, 3)
    def construct(self, x):
        x = self.conv(x)
        x = self.conv2(x)
        return x

net = Net()

# 定义钩子函数
def post_load_hook(cell, incompatible_keys):
    print("load_param_into_net post load hook triggered.")
    print(incompatible_keys.missing_keys)
    print(incompatible_keys.unexpected_keys)
    incompatible_keys.missing_keys.clear()
    incompatible_keys.unexpected_keys.clear()

# 注册钩子函数
handle = net.register_load_param_into_net_post_hook(post_load_hook)
param_dict = {
    'conv.weight': ms.Tensor(ms.numpy.randn(20, 1, 5, 5)),
    'conv2.weight': ms.Tensor(ms.numpy.randn(32, 20, 3, 3))
}
param_list = [(k, ms.Parameter(v)) for k, v in param_dict.items()]
param_dict = {k: v for k, v in param_list}

# 运行加载模型的函数并触发钩子函数的运行
load_param_into_net(net, param_dict, strict_load = False)  

# 移除定义的钩子函数
handle.remove()
