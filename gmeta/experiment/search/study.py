"""A search for settings with Optuna, which `gmeta tune` runs for minutes or hours and can resume later.

A family of experiments defines a `Search`: a `Tunable` for each method, with the initial settings, the space,
and a function that trains with some settings and measures them on validation data. The file ``study.db`` has
one study for each method. Trials run one after the other. The next trial is of the method whose trials have
taken the least time, so methods get equal shares of any budget, also over several calls and in several
processes.

The file is an SQLite database, whose transactions keep each study whole if a process is killed or the disk is
full; in a journal file, a partly written line would make the study unreadable.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from gmeta.core.errors import GmetaError, NotFiniteError
from gmeta.core.graph import gradients_released
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.core.terminal import Interrupts, remember_interrupts
from gmeta.experiment.search.trials import LEAST_GAIN, list_changes

M = TypeVar("M")

FILE_NAME = "study.db"
_BEAT = 15  # seconds between heartbeats of a trial; without one for twice that time, it counts as killed
_START, _ITSELF, _METHOD = "start", "itself", "method"
_RANDOM = 8  # trials of a study, including the initial ones, before the sampler models the others


# The definitions that a family of experiments makes. A key names a setting by its path in the method, such as
# "inner.learning_rate".


@dataclass(frozen=True)
class Range:
    """A setting that is a number.

    Attributes:
      key: The setting.
      least: The lowest value.
      most: The highest value.
      log: Whether values are drawn uniformly on the log scale.
      whole: Whether the setting is a whole number.
    """

    key: str
    least: float
    most: float
    log: bool = True
    whole: bool = False

    def round(self, value: float) -> float:
        """Round the value for a settings file: to a whole number, or to three significant digits."""
        return round(value) if self.whole else float(f"{value:.3g}")


@dataclass(frozen=True)
class Choice:
    """A setting that is one of a few values.

    Attributes:
      key: The setting.
      values: The values.
    """

    key: str
    values: tuple[Any, ...]

    def round(self, value: Any) -> Any:
        """Return the value."""
        return value


Space = Sequence[Range | Choice]


def get_setting(method: Any, key: str) -> Any:
    """Return a setting of a method.

    Example:
      >>> from gmeta.experiment.plan.experiment_config import MethodConfig
      >>> get_setting(MethodConfig("MAML", "adapts", epochs=7), "epochs")
      7
    """
    for name in key.split("."):
        method = getattr(method, name)
    return method


def put_setting(method: M, key: str, value: Any) -> M:
    """Return the method with a new value of a setting."""
    name, _, rest = key.partition(".")
    return replace(method, **{name: put_setting(getattr(method, name), rest, value) if rest else value})  # type: ignore[type-var]


@dataclass(frozen=True)
class Measured:
    """The result of a trial on validation data.

    Attributes:
      value: The value of ``method``.
      method: The settings with the best number of epochs.
      itself: The value of the settings that the trial was given.
    """

    value: float
    method: Any
    itself: float


Report = Callable[[int, float], None]
"""Takes the step of a trial, the same in all trials of a method, and the value then; may end the trial."""


@dataclass(frozen=True)
class Tunable:
    """A method to tune.

    Attributes:
      name: The method's name.
      label: Its name in tables.
      starts: The settings of the first trials: the present ones, and others that may be better.
      space: The settings that are searched over.
      evaluate: Trains with some settings and measures them. It calls the `Report` after each part of the
        epochs but the last, and the callback of the interrupts in each step.
      seconds: An estimate of the duration of a trial.
      warm_up: A trial isn't pruned for its values up to this step.
    """

    name: str
    label: str
    starts: Sequence[Any]
    space: Space
    evaluate: Callable[[Any, Report, Interrupts], Measured]
    seconds: float
    warm_up: int = 0


@dataclass(frozen=True)
class Search:
    """The methods of an experiment to tune.

    Attributes:
      tunables: The methods.
      measure: The name of a trial's value, such as ``"log loss"``.
      maximize: Whether higher values are better.
      begun: The other inputs of trials besides a method's settings, as JSON values: data and other settings.
    """

    tunables: Sequence[Tunable]
    measure: str
    maximize: bool
    begun: Mapping[str, Any]


@dataclass(frozen=True)
class Tuned:
    """The result of the search for a method.

    Attributes:
      tunable: The method.
      method: The settings: the best ones if they are better by `LEAST_GAIN`, else the present ones.
      before: The value of the present settings; None: their trial isn't complete.
      after: The best value of all trials; None: no trial is complete.
      trials: The number of complete trials, in all calls.
      pruned: The number of further trials that were ended early.
    """

    tunable: Tunable
    method: Any
    before: float | None
    after: float | None
    trials: int
    pruned: int

    @property
    def changes(self) -> list[str]:
        """The settings that differ from the present ones, ``"epochs = 12"``."""
        return list_changes(to_mapping(self.tunable.starts[0]), to_mapping(self.method))


@dataclass(frozen=True)
class Found:
    """The result of `search_settings`.

    Attributes:
      methods: A `Tuned` for each method.
      interrupted: Whether an interrupt ended the search.
    """

    methods: Sequence[Tuned]
    interrupted: bool


# One method's study.


@dataclass
class _Study:
    """The study of a method, and the state of this call."""

    tunable: Tunable
    search: Search
    study: optuna.Study
    own: int = 0  # trials of this call

    @classmethod
    def open(cls, tunable: Tunable, search: Search, storage: Any) -> _Study:
        # Trials on other data, or with other settings of the experiment, aren't comparable: separate studies.
        begun = {
            **search.begun,
            "starts": to_mapping(tunable.starts[0]),
            "space": list(map(repr, tunable.space)),
        }
        digest = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()
        study = optuna.create_study(
            storage=storage,
            study_name=f"{tunable.name}-{digest[:12]}",
            direction="maximize" if search.maximize else "minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=tunable.warm_up),
        )
        # Each call has a different seed, or else a resumed study would draw the same settings again.
        study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=_RANDOM, multivariate=True, constant_liar=True, seed=len(study.trials)
        )
        return cls(tunable, search, study)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def seconds(self) -> float:
        """Return the total time of the trials of all calls."""
        ended = self.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return sum(each.duration.total_seconds() for each in ended if each.duration)

    def of_trial(self) -> tuple[float, bool]:
        """Return the duration of a trial, and whether it was measured."""
        ended = [each.duration.total_seconds() for each in self.trials(TrialState.COMPLETE) if each.duration]
        return (float(np.median(ended)), True) if ended else (self.tunable.seconds, False)

    def run(self, deadline: float, interrupts: Interrupts, say: Callable[[str], None]) -> None:
        """Run the next trial, and end it at the deadline."""
        self._begin_with_starts()
        self.own += 1

        begun: list[int] = []

        def evaluate(trial: Trial) -> float:
            begun.append(trial.number)
            method = self._ask(trial)

            def report(step: int, value: float) -> None:
                trial.report(value, step)
                interrupts.raise_again()
                if time.monotonic() > deadline:
                    raise _OutOfTimeError
                if trial.should_prune():
                    raise optuna.TrialPruned

            try:
                found = self.tunable.evaluate(method, report, interrupts)
            except NotFiniteError as error:
                say(f"{self.tunable.label}, trial {trial.number + 1}: diverges: {error}")
                worst = -math.inf if self.search.maximize else math.inf
                found = Measured(worst, method, worst)
            trial.set_user_attr(_METHOD, to_mapping(found.method))
            trial.set_user_attr(_ITSELF, found.itself)
            return found.value

        # A trial that the budget ended is no evidence about its settings, so it counts as failed.
        with gradients_released():
            self.study.optimize(evaluate, n_trials=1, catch=(_OutOfTimeError,))
        gc.collect()  # a model's tables
        say(self._describe(self.study.trials[begun[0]]))

    def _begin_with_starts(self) -> None:
        """Enqueue the initial settings, unless their trials are complete, waiting, or running elsewhere."""
        optuna.storages.fail_stale_trials(self.study)
        of = {each.user_attrs.get(_START) for each in self.trials() if each.state != TrialState.FAIL}
        for number, method in enumerate(self.tunable.starts):
            if number not in of:
                values = {each.key: get_setting(method, each.key) for each in self.tunable.space}
                self.study.enqueue_trial(values, user_attrs={_START: number})

    def _ask(self, trial: Trial) -> Any:
        method = self.tunable.starts[trial.user_attrs.get(_START, 0)]
        for each in self.tunable.space:
            if isinstance(each, Choice):
                value = trial.suggest_categorical(each.key, each.values)
            elif each.whole:
                value = trial.suggest_int(each.key, int(each.least), int(each.most), log=each.log)
            else:
                value = trial.suggest_float(each.key, each.least, each.most, log=each.log)
            if _START not in trial.user_attrs:
                method = put_setting(method, each.key, each.round(value))
        return method

    def _describe(self, last: FrozenTrial) -> str:
        took = last.duration.total_seconds() if last.duration else 0.0
        what = f"{self.tunable.label}, trial {last.number + 1}, {took:.0f} s"
        if last.state != TrialState.COMPLETE:
            return f"{what}: ended early"
        best = self.best()
        assert best is not None
        values = f"{self.search.measure} {last.value:.4f}, best {best.value:.4f}"
        return f"{what}: {values}: {', '.join(self._changes(last)) or 'the present settings'}"

    def _changes(self, trial: FrozenTrial) -> list[str]:
        return list_changes(to_mapping(self.tunable.starts[0]), dict(trial.user_attrs[_METHOD]))

    def best(self) -> FrozenTrial | None:
        """Return the best complete trial."""
        ended = self.trials(TrialState.COMPLETE)
        sign = -1 if self.search.maximize else 1
        return min(ended, key=lambda each: sign * each.value, default=None)

    def result(self) -> Tuned:
        ended = self.trials(TrialState.COMPLETE)
        first = next((each for each in ended if each.user_attrs.get(_START) == 0), None)
        best, before = self.best(), None if first is None else float(first.user_attrs[_ITSELF])
        method = present = self.tunable.starts[0]
        if best is not None and before is not None and self._is_better(best.value, before):
            # Other settings, or the present ones with fewer epochs.
            method = from_mapping(type(present), best.user_attrs[_METHOD], where=f"trial {best.number + 1}")
        pruned = len(self.trials(TrialState.PRUNED))
        return Tuned(self.tunable, method, before, best and best.value, len(ended), pruned)

    def _is_better(self, value: float, before: float) -> bool:
        if self.search.maximize:
            return value > before * (1 + LEAST_GAIN)
        return value < before * (1 - LEAST_GAIN)


class _OutOfTimeError(Exception):
    """A trial has reached the end of the budget."""


# The search over all methods.


def search_settings(
    search: Search,
    folder: Path,
    *,
    seconds: float,
    trials: int | None = None,
    say: Callable[[str], None],
) -> Found:
    """Search for better settings of all methods, and add to the results of earlier calls.

    Args:
      search: The methods. Different data or present settings get separate studies in the file.
      folder: The folder of ``study.db``. Several processes may search in it at once.
      seconds: The time limit; a trial that is running then ends after a part of its epochs.
      trials: The maximum number of trials of a method in this call.
      say: Called with the sentences that describe the plan and each trial.

    Raises:
      DataError: A record is bad.
      GmetaError: The file can't be read or written.
    """
    file = folder / FILE_NAME
    with _explain_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{file.resolve()}",
            engine_kwargs={"connect_args": {"timeout": 60}},  # while another process writes
            heartbeat_interval=_BEAT,
        )
        studies = [_Study.open(tunable, search, storage) for tunable in search.tunables]
        others = len(storage.get_all_studies()) > len(studies)
        say(_plan(studies, seconds, trials, others))
        interrupted = _run_all(studies, time.monotonic() + seconds, trials, say)
        return Found([each.result() for each in studies], interrupted)


def _plan(studies: Sequence[_Study], seconds: float, trials: int | None, others: bool) -> str:
    """Describe how many trials the budget allows."""
    share = seconds / max(len(studies), 1)
    parts, before = [], 0
    for each in studies:
        of_trial, measured = each.of_trial()
        count = share / max(of_trial, 1e-3)
        count = min(int(count), trials or int(count))
        how = "as before" if measured else "estimated"
        parts.append(f"{count or 'less than one'} of {each.tunable.label} ({of_trial:.0f} s each, {how})")
        before += len(each.trials(TrialState.COMPLETE, TrialState.PRUNED))
    went = "begins; earlier trials were of other data or settings" if others else "begins"
    went = f"goes on after {before} trials" if before else went
    return f"{went}: {seconds:.0f} s, {share:.0f} s a method, are about {', '.join(parts)} trials"


def _run_all(
    studies: Sequence[_Study], deadline: float, trials: int | None, say: Callable[[str], None]
) -> bool:
    """Run trials until the deadline; return whether an interrupt came before."""
    with remember_interrupts() as interrupts:
        try:
            while True:
                left = deadline - time.monotonic()
                # A trial that takes longer than the remaining time starts only if there are no results yet.
                fitting = [
                    each
                    for each in studies
                    if (trials is None or each.own < trials)
                    and left > (each.of_trial()[0] if each.of_trial()[1] else 0)
                ]
                if not fitting:
                    return False
                min(fitting, key=_Study.seconds).run(deadline, interrupts, say)
                interrupts.raise_again()
        except BaseException:
            if not interrupts.came:  # C++ may have changed its type
                raise
            return True


@contextlib.contextmanager
def _explain_errors(file: Path) -> Iterator[None]:
    """Report errors of the file in one line; the studies in it stay whole."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error if isinstance(error, SQLAlchemyError) else error.__cause__ or error
        reason = getattr(cause, "orig", None) or cause
        raise GmetaError(
            f"{file}: {reason}; make room or mend the file: the trials in it are kept, and the same command "
            "goes on from there"
        ) from error
