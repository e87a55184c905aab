"""One command that runs the same model with the same weights in every system, each in a process of its own.

python -m bench.suite --out FOLDER [--layers 16] [--tokens 1,2048] [--device cuda]
"""
