"""Seeded bugs: does `make test` find what all tests find? Run it by hand: python -m tests.mutants.

Each bug is put into a copy of the tree. Tests of its room come first, then the six-minute tier, then, where that finds
nothing, the tests that `make test` leaves out. Prints the table of docs/tests.md.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1]
FAST = "not slow or essential"
SLOW = "slow and not essential"


@dataclass(frozen=True)
class Mutant:
    """One bug: in ``file`` the text ``before``, which is there once, becomes ``after``; ``room`` has its own tests."""

    bug: str
    file: str
    before: str
    after: str
    room: str


MUTANTS = (
    Mutant(
        "Gaussian noise of half the width",
        "fedpriv/mechanisms/gaussian.py",
        "deviation = self.sigma * self.clip_norm / batch_size",
        "deviation = 0.5 * self.sigma * self.clip_norm / batch_size",
        "tests/mechanisms",
    ),
    Mutant(
        "gradients shorter than the bound are stretched to it",
        "fedpriv/mechanisms/machinery/clipping.py",
        ".clamp_(max=1).nan_to_num_(nan=0.0)",
        ".nan_to_num_(nan=0.0)",
        "tests/mechanisms",
    ),
    Mutant(
        "VMF draws with one twentieth more concentration",
        "fedpriv/mechanisms/vmf.py",
        "draws = Draws(self.kappa,",
        "draws = Draws(1.05 * self.kappa,",
        "tests/mechanisms",
    ),
    Mutant(
        "Laplace noise has one sign only",
        "fedpriv/mechanisms/laplace.py",
        "return (-size).where(negative, size)",
        "return size",
        "tests/mechanisms",
    ),
    Mutant(
        "the same noise in each step of a round",
        "clients/training.py",
        'secret.stream("noise", step)',
        'secret.stream("noise", 0)',
        "tests/clients",
    ),
    Mutant(
        "the sensitivity of replace-one is that of zero-out",
        "fedpriv/accounting/gaussian_proof.py",
        "return 1 if self._is_zero_out else 2",
        "return 1",
        "tests/accounting",
    ),
    Mutant(
        "amplification by half the sampling rate",
        "fedpriv/accounting/amplification.py",
        "return float(np.log1p(rate * np.expm1(epsilon)))",
        "return float(np.log1p(0.5 * rate * np.expm1(epsilon)))",
        "tests/accounting",
    ),
    Mutant(
        "one participation too few in a pass that goes on over rounds",
        "fedpriv/core/plan.py",
        "return steps[-1] // per_pass - max(begun, steps[0] // per_pass - 1)",
        "return steps[-1] // per_pass - max(begun, steps[0] // per_pass)",
        "tests/core/test_plan.py tests/core/test_budget.py",
    ),
    Mutant(
        "votes: the answer has half its noise",
        "fedpriv/accounting/aggregators.py",
        "generator.normal(0.0, self.sigma, len(known))",
        "generator.normal(0.0, 0.5 * self.sigma, len(known))",
        "tests/accounting/test_accounting_aggregators.py tests/privacy/test_privacy_votes.py",
    ),
    Mutant(
        "votes: a threshold costs nothing",
        "fedpriv/accounting/aggregators.py",
        "math.sqrt(asked / self.sigma1**2 + 2 * answered / self.sigma2**2)",
        "math.sqrt(2 * answered / self.sigma2**2)",
        "tests/accounting/test_accounting_aggregators.py tests/privacy/test_privacy_votes.py",
    ),
    Mutant(
        "votes: the smooth sensitivity is the local one",
        "fedpriv/accounting/votes.py",
        "float(np.max(np.exp(-beta * np.arange(len(local))) * local))",
        "float(local[0])",
        "tests/accounting/test_accounting_votes.py",
    ),
    Mutant(
        "votes: the claim is of the questions that the votes left room for",
        "fedpriv/algorithms/pate/settings.py",
        "most = self.queries if is_adaptive else asked",
        "most = asked",
        "tests/algorithms/pate/test_pate.py",
    ),
    Mutant(
        "votes: all questions have the same noise",
        "fedpriv/algorithms/pate/server.py",
        'secret.stream("question", number)',
        'secret.stream("question", 0)',
        "tests/algorithms/pate/test_pate.py",
    ),
    Mutant(
        "votes: shares of the noise for more clients than must stay",
        "fedpriv/mechanisms/machinery/whole_numbers.py",
        "share = sigma / math.sqrt(least_survivors(clients))",
        "share = sigma / math.sqrt(clients)",
        "tests/mechanisms/test_mechanisms_quantisation.py",
    ),
    Mutant(
        "a budget allows one participation too many",
        "fedpriv/core/budget.py",
        "return bisect_right(range(1, planned), target, key=figure)\n",
        "return bisect_right(range(1, planned), target, key=figure) + 1\n",
        "tests/core/test_budget.py",
    ),
    Mutant(
        "uploads are weighted alike though sizes differ",
        "fedpriv/core/federated.py",
        'if weighting == "examples"',
        'if weighting == "uniform"',
        "tests/server",
    ),
    Mutant(
        "the server moves against a FedAvg update",
        "fedpriv/core/federated.py",
        'return 1 if algorithm == "fedsgd" else -1',
        "return 1",
        "tests/server",
    ),
    Mutant(
        "a resumed run forgets who was asked before",
        "server/rounds.py",
        "replay(budget, [line for line in earlier if line.round <= done])",
        "replay(budget, [line for line in earlier if line.round < done])",
        "tests/integration tests/server",
    ),
    Mutant(
        "a checkpoint names the round before it",
        "fedpriv/core/runs.py",
        'metadata={"round": str(checkpoint.round)}',
        'metadata={"round": str(max(checkpoint.round - 1, 0))}',
        "tests/core/test_runs.py tests/integration",
    ),
    Mutant(
        "batches overlap within a pass",
        "fedpriv/data/sampling.py",
        "order[position * self.batch_size : (position + 1) * self.batch_size].copy()",
        "order[position * (self.batch_size - 1) : position * (self.batch_size - 1) + self.batch_size].copy()",
        "tests/data",
    ),
    Mutant(
        "the angle that attacks minimise leaves out the upload's length",
        "attacks/reconstruction/matching.py",
        "lengths = comparison.squared * comparison.heard",
        "lengths = comparison.squared * comparison.squared",
        "tests/attacks",
    ),
    Mutant(
        "iDLG takes the largest entry for the label",
        "attacks/reconstruction/labels.py",
        "return _output_gradient(heard, layer).argmin().reshape(1)",
        "return _output_gradient(heard, layer).argmax().reshape(1)",
        "tests/attacks",
    ),
    Mutant(
        "ties count for the attack when pictures are picked from a line-up",
        "attacks/referee.py",
        "nearer = (distances <= own[:, None] * (1 + 1e-9)) & differs",
        "nearer = (distances < own[:, None] * (1 - 1e-9)) & differs",
        "tests/attacks",
    ),
    Mutant(
        "limits of an audit at the wrong confidence",
        "attacks/epsilon.py",
        "binomial_lower(right, len(scores), 1 - confidence)",
        "binomial_lower(right, len(scores), confidence)",
        "tests/attacks/membership tests/attacks/canaries",
    ),
    Mutant(
        "votes with half the noise that certificates rest on",
        "fedpriv/robustness/noise.py",
        "return noise.mul_(self.deviations.to(like.device, dtype))",
        "return noise.mul_(0.5 * self.deviations.to(like.device, dtype))",
        "tests/robustness",
    ),
    Mutant(
        "norms of certificates forget the data set's deviation",
        "fedpriv/robustness/norms.py",
        "return self.layer.value_at(self.network, self.normalise(pixels))",
        "return self.layer.value_at(self.network, pixels)",
        "tests/robustness",
    ),
    Mutant(
        "the bound of the largest change of a pixel lacks the root of K",
        "fedpriv/robustness/norms.py",
        "float(rows.square().sum())",
        "float(rows.square().max())",
        "tests/robustness",
    ),
    Mutant(
        "certificates from a lower bound at half the confidence",
        "attacks/intervals.py",
        "float(scipy.special.betaincinv(count, trials - count + 1, alpha))",
        "float(scipy.special.betaincinv(count, trials - count + 1, 0.5))",
        "tests/robustness",
    ),
    Mutant(
        "query ledger: questions of one batch of requests are counted one by one",
        "fedpriv/service/ledger.py",
        "own = None if limit is None else limit - self._used[request.user] - taken",
        "own = None if limit is None else limit - self._used[request.user]",
        "tests/service",
    ),
    Mutant(
        "labels: half the epsilon in the ledger",
        "fedpriv/accounting/response.py",
        "    claim = Claim(response.epsilon, theorem)",
        "    claim = Claim(0.5 * response.epsilon, theorem)",
        "tests/accounting",
    ),
    Mutant(
        "labels: half as many are changed",
        "fedpriv/algorithms/labels/preparation.py",
        "kept = noise.uniform(len(labels)) < response.keep",
        "kept = noise.uniform(len(labels)) < 0.5 + 0.5 * response.keep",
        "tests/accounting/test_accounting_response.py",
    ),
    Mutant(
        "a worker whose sweep was killed counts its client as failed",
        "fedpriv/engines/tasks.py",
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        "signal.getsignal(signal.SIGTERM)",
        "tests/sweep",
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the mutants whose words are given, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs whose description contains one of these")
    parser.add_argument("--workers", default="2", help="processes")
    options = parser.parse_args(arguments)
    chosen = [each for each in MUTANTS if not options.words or any(word in each.bug for word in options.words)]
    print("| bug | found by `make test` | seconds | else by `make test-all` |\n| --- | --- | --- | --- |", flush=True)
    for mutant in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            _copy(mutant, tree)
            places = [mutant.room.split(), ["tests"]]
            fast = next(filter(None, (_first_failure(tree, options.workers, FAST, place) for place in places)), "")
            seconds = time.monotonic() - began
            slow = (_first_failure(tree, options.workers, SLOW, place) for place in places if not fast)
            text = "" if fast else next(filter(None, slow), "**nothing**")
        print(f"| {mutant.bug} | {fast or 'nothing'} | {seconds:.0f} | {text} |", flush=True)


def _copy(mutant: Mutant, tree: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=HOME, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(HOME / name, tree / name, follow_symlinks=False)
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        raise SystemExit(f"{mutant.bug}: its text is {text.count(mutant.before)} times in {mutant.file}, not once")
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")


def _first_failure(tree: Path, workers: str, marker: str, paths: Sequence[str]) -> str:
    """The first test that fails; empty where all pass."""
    others = "--ignore=tests/test_mutants.py"  # which finds any bug, by its text
    options = ["-x", "-m", marker, "-n", workers, "--dist", "worksteal", "-rfE", others]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?\.py)(?:::(\w+))?", done.stdout, re.MULTILINE)
    if done.returncode and failed is None:
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return f"`{Path(failed[1]).name}::{failed[2]}`" if failed else ""


if __name__ == "__main__":
    main()
