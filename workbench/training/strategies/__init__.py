"""Applies a strategy to a module. ``training/parallel.py`` puts the parts together.

`state` records the strategy on a module, and `layouts` the layouts of parameters and inputs. `shard_parameters` makes
parameters and buffers global. `layout_hooks` box at layers. `materialize` gives values to models on meta. `loading`
reads values from safetensors files (`safetensors_file` is the format). `reshard_state` brings an optimizer's state to
another strategy.
"""
