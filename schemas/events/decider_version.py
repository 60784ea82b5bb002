"""The version of the rules by which this release decides on runs and evaluations.

A run has the version of the release that it was requested with, for as long as it lives. A process whose
version is lower neither decides on the run nor claims its effects, so processes of two releases can work
side by side. A process whose version is higher decides on it by the rules of the run's version, and
writes only what a release of that version can read.

Raise it by one in each release that decides differently in a way that an older process could not
continue, that appends an event of a new type or a new version, or that requests a new effect. Such a
release does so only in runs of its own version (`RunRequested.decider`).
"""

DECIDER_VERSION = 3
"""2: a run with a curriculum appends PoolsDecided.
3: the samples of a step are tested before they are trained, and SampleRefuted names those that fail. A
   run may be a fork (`RunRequested.fork`), and one with a budget appends BudgetExhausted."""

ATTESTS = 3
"""The first version whose runs test their samples."""
