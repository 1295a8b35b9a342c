"""Measurement: how close a policy comes to full attention on a real model, and at what cost.

errors    an error with a message for the user
model     SmolLM2 from PyPI, or any other model
texts     texts, and haystacks with a passkey
tasks/    questions with right answers
gsm8k     worked solutions, a chain of thought
runs      policies at budgets, and the options that are the same for all
probe     the true mass of what a layer attended to
decode    an exact prefill shared by all policies; decoding after it
kl        distance of the next-token distributions, on given text
capture   keys, values and queries of every layer
layouts   ways to lay tokens out in pages
purity    what pages of each layout are worth
calibration  estimated against true errors
passkey   retrieval
comparison, ledger  what a comparison measured, and its file
traffic   what a policy would send to a device
compare   every policy on texts and questions
drift     far into decoding
campaign  what `icecache compare` is asked for
demo      full attention and icecache side by side
report    tables and JSON

Needs the extra `eval` (torch, transformers, rich, typer, gguf, accelerate).
"""
