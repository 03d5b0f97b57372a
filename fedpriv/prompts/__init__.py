"""Private in-context learning: examples in prompts of a language model, and what they reveal.

- settings.py, texts.py: the file of ``fedpriv icl``, the examples that it names, and prompts of them.
- language.py, remote.py: language models through one interface.
- classify.py: answers by votes of prompts (Wu, Panda, Wang and Mittal, ICLR 2024).
- generate.py: synthetic examples, token by token (Tang et al., ICLR 2024).
- leaks.py: what prompts give away, and what private answers do.
- masked.py: votes under masks.
- run.py, folder.py, records.py, report.py, cli.py: a run, from its settings to its page.
"""
