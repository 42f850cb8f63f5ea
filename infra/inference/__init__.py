"""The policy, token in and token out: what samples actions and knows which weights did.

`base.py` is the seam (`PolicyClient`) with its data and errors; `vllm.py` speaks it to a vLLM server or to our own
`local_server/` (transformers, for machines where vLLM is too heavy), in the words of `vllm_wire.py`; `scripted.py` is
the in-memory twin. `pool.py` waits for one of several engines, `sync.py` brings a run's weights into one,
`model_digest.py` names a tokenizer. Only `local_server/` imports torch.
"""
