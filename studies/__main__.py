"""Run one study: ``python -m studies NAME``; ``python -m studies`` lists them."""

from studies.arguments import run

if __name__ == "__main__":
    run("studies")
