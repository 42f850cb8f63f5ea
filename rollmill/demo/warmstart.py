"""The demo's model: a word-level transformer that imitates a clumsy walker.

Demonstrations are rendered exactly as RUN renders episodes, turn by turn, so the model meets the same tokens in the
warm start, in rollouts and in training. The loss is on the action tokens and the end of the turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.demo.recipe import Recipe
from stages.handlers.keydoor import WORDS
from stages.handlers.keydoor_policies import demonstration
from stages.run.conversation import Conversation
from stages.run.render import Renderer
from trainer.models import create_wordlevel_model
from trainer.sft import Example, SftProgress, SftResult, warm_start


def make_model(directory: Path, seed: int) -> None:
    """Write the untrained model."""
    create_wordlevel_model(directory, seed=seed, words=WORDS)


def warm(base: Path, target: Path, recipe: Recipe, seed: int, on_step: Callable[[SftProgress], None]) -> SftResult:
    """Train the untrained model on demonstrations and write the result to target; blocking."""
    renderer = Renderer(base)
    return warm_start(base, target, examples(renderer, recipe, seed), recipe.sft, on_step)


def examples(renderer: Renderer, recipe: Recipe, seed: int) -> Iterator[Example]:
    """Yield fresh demonstrations, endlessly."""
    payload = {"size": recipe.size, "turns": recipe.turns, "split": "train"}
    for number in itertools.count():
        yield example(renderer, demonstration(payload, seed * 1_000_003 + number))


def example(renderer: Renderer, messages: list[dict[str, Any]]) -> Example:
    """Return one conversation as tokens and mask; the mask is 1 on the assistant's text and its end of turn."""
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    conversation = Conversation(renderer, messages[:first])
    tokens = [conversation.opening()]
    masks = [np.zeros(len(tokens[0]), np.uint8)]
    for index in range(first, len(messages), 2):
        answer = renderer.answer(messages[index]["content"])
        tokens.append(answer)
        masks.append(np.ones(len(answer), np.uint8))
        reply = messages[index + 1 : index + 2]
        if reply:
            glue = conversation.followed(messages[index]["content"], reply, last=int(answer[-1]))
            assert not glue.rewritten, "the demo's own template keeps what was said"
            tokens.append(glue.ids)
            masks.append(np.zeros(len(glue.ids), np.uint8))
    return Example(tokens=np.concatenate(tokens), mask=np.concatenate(masks))
