"""How a strategy is carried out on a module; ``training/parallel.py`` puts the parts together.

`state` records what was done, `layouts` where everything lies. `shard_parameters` makes parameters and buffers global,
and `layout_hooks` box at layers. `materialize` gives values to models on meta, and `loading` reads them from
safetensors (`safetensors_file` is the format). `reshard_state` brings an optimizer's state to another strategy.
"""
