"""Run one benchmark: ``python -m benchmarks NAME``; ``python -m benchmarks`` lists them."""

from studies.arguments import run

if __name__ == "__main__":
    run("benchmarks")
