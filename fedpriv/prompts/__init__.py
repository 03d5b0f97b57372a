"""Private in-context learning: examples in prompts of a language model, and what they reveal.

- settings.py, texts.py: the file of ``fedpriv icl``, and the examples that it names.
- language.py, llama.py, remote.py: language models through one interface.
- wording.py: from examples to prompts; who is in which, drawn afresh for each use.
- classify.py: answers by votes of prompts (Wu, Panda, Wang and Mittal, ICLR 2024).
- generate.py: synthetic examples, token by token (Tang et al., ICLR 2024).
- leaks.py: what prompts give away, and what private answers do.
- client.py, server.py: votes under masks.
- run.py, folder.py, records.py, report.py, cli.py: a run, from its settings to its page.
"""
