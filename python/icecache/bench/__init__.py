"""Timing against baselines that are measured in the same run, on the rows of a real model.

lengthen   rows of 32k to 256k tokens, made from real ones
rows       keys, values and queries of SmolLM2, computed once
heads      layers of any shape, made from real KV heads: SmolLM2's, or a file's
timing     clock, quantiles, the memory's bandwidth
baselines  torch's attention in its forms, exact scan + top
libraries  approximate search by other libraries
step       `icecache bench step`: one decode step of a layer
build      `icecache bench build`: indexing a layer, and all layers of a model against its prefill
insert     `icecache bench insert`: tokens that come one by one
generate   `icecache bench generate`: a model's token against other caches
report     tables, the plot, and what is needed to repeat a run

Every command refuses to time a wrong answer. Needs the extra `bench` (`eval` and matplotlib).
"""
