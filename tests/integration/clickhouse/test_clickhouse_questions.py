"""The questions that the demo proposes can be asked as they are printed."""

from __future__ import annotations

import pytest

from infra.clickhouse import schema
from infra.clickhouse.client import connect
from rollmill.demo.queries import CONSERVATION, QUESTIONS

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("question", [CONSERVATION, *QUESTIONS], ids=lambda question: question.text)
async def test_a_proposed_question_has_an_answer(address, question):
    """Each query runs on the schema as it is."""
    await schema.apply(address)
    client = await connect(address)
    try:
        found = await client.query(question.of("some-run"))
    finally:
        await client.close()

    assert found.row_count >= 0  # nothing is stored: what counts is that ClickHouse understood the query
