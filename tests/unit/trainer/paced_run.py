"""A paced run without tokens, model or log: a feeder that obeys the credit, groups that end in any order."""

from __future__ import annotations

import random

from synthetic_log import START, end, failed, rules

from trainer.algorithm_config import Late
from trainer.decision_records import step_decided
from trainer.groups import Dropped, GroupAssembler, Step


class PacedRun:
    """Feeder, policy and reaper in one, beside an assembler; every group has two siblings."""

    def __init__(self, seed, *, groups, max_lag, source, dull=0.2, lost=0.1, foreign=0.0, late=Late.WAIT):
        self.draw = random.Random(seed)
        self.rules = rules(groups=groups, max_lag=max_lag, late=late)
        self.machine = GroupAssembler(self.rules, START, versions={0: 0})
        self.source, self.dull, self.lost, self.foreign = source, dull, lost, foreign
        self.open, self.log, self.events, self.lags = [], [], [], []
        self.admitted = 0

    def admit(self):
        """Let groups out as far as the credit goes; they are sampled by the weights of this moment."""
        limit = self.machine.resolved + (self.rules.max_lag + 1) * self.rules.groups
        while self.admitted < min(limit, self.source):
            name = f"g{self.admitted:03d}"
            varies = self.draw.random() > self.dull
            self.open += [
                (name, sample, self.admitted, self.machine.steps, float(varies and sample)) for sample in range(2)
            ]
            self.admitted += 1

    def finish(self, at):
        """End one open sample, in any way, and do what is decided by it."""
        name, sample, admission, version, success = self.open.pop(at)
        offset = len(self.log)
        if self.draw.random() < self.lost:
            record = failed(offset, name, sample, admission=admission)
        else:
            record = end(offset, name, sample, success, admission=admission, sampled=((version, 3),))
        self.log.append(record)
        self._do(self.machine.feed(record))

    def step_by_foreigners(self):
        """End both samples of a group that nobody admitted."""
        name = f"x{len(self.log):03d}"
        for sample in range(2):
            record = end(len(self.log), name, sample, float(sample), admission=None, sampled=((self.machine.steps, 3),))
            self.log.append(record)
            self._do(self.machine.feed(record))

    def _do(self, events):
        while True:
            self.events += events
            for event in events:
                if isinstance(event, Step):
                    self.machine.published(event.number, event.number)
                    self.lags += [
                        event.number - 1 - version
                        for t in event.terminals
                        for version, _ in t.sampled
                        if t.admission is not None
                    ]
            events = self.machine.due()
            if not events:
                return

    def run(self, *, stragglers=0.0):
        """Go on until nothing is open: the slowest sample of all is ended by the reaper when nothing else is there."""
        self.admit()
        slow = set()
        while self.open:
            slow |= {
                item for item in self.open if item not in slow and item[1] == 1 and self.draw.random() < stragglers
            }
            quick = [at for at, item in enumerate(self.open) if item not in slow]
            if self.draw.random() < self.foreign:
                self.step_by_foreigners()
            self.finish(self.draw.choice(quick) if quick else self.draw.randrange(len(self.open)))
            self.admit()
        return self

    @property
    def steps(self):
        """The steps that were decided."""
        return [event for event in self.events if isinstance(event, Step)]

    @property
    def drops(self):
        """The groups that were dropped."""
        return [event for event in self.events if isinstance(event, Dropped)]


def as_decided(step, epoch=0):
    """Return a step as it is written down."""
    return step_decided(step, run="r", epoch=epoch, tell_rows=False)
