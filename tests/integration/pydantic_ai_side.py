"""An agent of Pydantic AI that knows a `base_url` and a key: `python tests/integration/pydantic_ai_side.py PACKAGES`.

PACKAGES is a folder that holds pydantic_ai. Address and key are in the variables that OpenAI's client reads. Prints
what its tool was called with and what the agent said, whole and as a stream, as one JSON object last.
"""

from __future__ import annotations

import asyncio
import json
import sys


async def main(packages):
    sys.path.append(packages)
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    looked = []
    model = OpenAIChatModel("policy", provider=OpenAIProvider())
    agent = Agent(model, system_prompt="be brief", model_settings={"temperature": 0.2, "max_tokens": 150})

    @agent.tool_plain
    def look(where: str) -> str:
        """Look into a direction."""
        looked.append(where)
        return "a door"

    first = await agent.run("what is in the north?")
    async with agent.run_stream("and what colour has it?", message_history=first.all_messages()) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    print(json.dumps({"looked": looked, "said": first.output, "streamed": "".join(pieces)}))  # noqa: T201 - for the test


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
