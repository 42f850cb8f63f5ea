"""Chat templates of the common model families, written out from how their turns look; none is anybody's file.

Each does what its family's does to a conversation: where it writes white space, whether it trims, what it makes of
tools and their results, and what becomes of thoughts in earlier turns.
"""

from __future__ import annotations

CHATML = """
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Of SmolLM2 and many others."""

QWEN_2 = """
{%- if tools -%}
{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
{{- '\\n\\n# Tools\\n' }}{%- for tool in tools -%}{{ (tool | tojson) + '\\n' }}{%- endfor -%}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- elif not (loop.first and message.role == 'system') -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Several results of tools are one turn of the user; a system turn is there in any case."""

QWEN_3 = """
{%- set ns = namespace(asked=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set said = message.content -%}{%- set thought = '' -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.asked and thought -%}
{{ '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + said + '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Thoughts stay until the user speaks again; results of tools are no such turn."""

DEEPSEEK_R1 = """
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}
{%- elif message.role == 'assistant' -%}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + '<|im_end|>' }}
{%- else -%}{{ '<|User|>' + message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|Assistant|><think>\\n' }}{%- endif -%}
"""
"""The generation prompt opens the thoughts, and no earlier turn has any: every turn begins a new prompt."""

LLAMA_3 = """
{{- bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
"""Contents are trimmed."""

MISTRAL = """
{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ ' ' + message.content + '<|im_end|>' }}
{%- else -%}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
"""
"""A space before each answer, and no generation prompt."""

GEMMA = """
{{- bos_token }}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{{ '<start_of_turn>' + role + '\\n' + (message.content | trim) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
"""The assistant is called the model."""

PHI = """
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
"""
"""Roles are special tokens."""

FAMILIES = {
    "chatml": CHATML,
    "qwen 2": QWEN_2,
    "qwen 3": QWEN_3,
    "deepseek r1": DEEPSEEK_R1,
    "llama 3": LLAMA_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": PHI,
}
"""Name -> template; all end a turn by `<|im_end|>`."""
