"""Three questions worth asking ClickHouse after the demo; a test asks each of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and how it is asked."""

    text: str
    """What one wants to know."""
    sql: str
    """The query; `{run}` is the run's name."""

    def of(self, run: str) -> str:
        """Return the query for a run."""
        return self.sql.replace("{run}", run)


CONSERVATION = Question(
    text="where did every sample go?",
    sql="SELECT * FROM conservation(run = '{run}')",
)

QUESTIONS = (
    Question(
        text="how does success rise with the version of the weights?",
        sql="SELECT max_version AS version, count() AS episodes, round(avg(success), 2) AS success, "
        "round(avg(turns), 1) AS turns FROM accepted WHERE run = '{run}' AND outcome = 'completed' "
        "GROUP BY version ORDER BY version",
    ),
    Question(
        text="what does the policy say when it is wrong?",
        sql="SELECT action, count() AS times FROM turns WHERE run = '{run}' AND NOT valid "
        "GROUP BY action ORDER BY times DESC LIMIT 10",
    ),
    Question(
        text="where does the time of a sample go?",
        sql="SELECT stage, kind, count() AS times, quantile(0.5)(waited_ms) AS median_wait_ms, "
        "quantile(0.5)(took_ms) AS median_ms, quantile(0.99)(took_ms) AS p99_ms FROM events WHERE run = '{run}' "
        "GROUP BY stage, kind ORDER BY stage, kind",
    ),
)
