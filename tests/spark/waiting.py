"""Histories of messages that wait while their broker starts again and again."""

from __future__ import annotations

import random

from tests.spark.histories import Event
from tests.spark.test_consumers import Story


def never_touched(seed: int) -> tuple[list[Event], list[int]]:
    """Return a history of a queue whose messages wait while its broker starts again and again, at times without some of
    them, and its cuts."""
    numbers = random.Random(seed)
    story = Story(messages=0, window=9)
    for sequence in range(1, 8):
        group = numbers.choice([None, None, 7])
        persistent = numbers.random() < 0.7
        story.add("accepted", sequence=sequence, priority=4, persistent=persistent, size=1, group=group)
    cuts = []
    present = 7
    run = 1
    for _ in range(4):
        if numbers.random() < 0.7:
            cuts.append(story.events[-1]["event"] + 1)
        if numbers.random() < 0.3:
            story.add("resumed", run=run).events[-1]["event"] += 1
            if numbers.random() < 0.3:
                continue
        run += numbers.choice([1, 1, 1, 1, 2])
        start = len(story.events)
        story.add("run-started", queue=None, reason=numbers.choice(["clean", "unclean"]))
        count = max(present - numbers.choice([0, 0, 1, 3, -2]), 0)
        if numbers.random() < 0.3:
            cuts.append(story.events[-1]["event"] + 1)
        if count:
            story.add("recovered", count=count)
        story.subscribe(run, window=9)
        for sequence in numbers.sample(range(1, 8), numbers.randint(0, 2)):
            story.dispatch(sequence, to=run)
            if numbers.random() < 0.5:
                story.requeue(sequence, attempts=numbers.choice([0, 1]))
            else:
                story.acknowledge(sequence)
                present -= 1
        if numbers.random() < 0.5:
            story.events[start]["reason"] = "unclean"
        for each in story.events[start:]:
            each["run"] = run
    return story.events, cuts
