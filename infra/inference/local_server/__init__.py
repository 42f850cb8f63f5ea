"""A policy engine on transformers for one machine, speaking vLLM's token-in, token-out protocol.

`engine.py` batches requests continuously in a thread of its own; `slots.py` decides which cached prefix a prompt may
reuse; `attention.py` lets one forward pass serve requests of any length; `sampler.py` draws; `weights.py` reads
models and swaps weights; `int8.py` has linear layers in a quarter of the memory; `app.py` is the HTTP face, and its
`serve` runs all of it until a signal. In `infra` only this folder imports torch; the client is
`infra/inference/vllm.py`.
"""
