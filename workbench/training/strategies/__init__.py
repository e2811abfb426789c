"""How a strategy is carried out on a module; ``training/parallel.py`` puts the parts together.

`state` is what was done, `layouts` what lies where, `spreading` the parameters and buffers, `doors` the boxing at
layers; `materializing` gives values to models on meta, `loading` reads them from safetensors (`safetensors_file` is the
format), `moving` takes an optimizer along to another strategy.
"""
