"""A soak: random programs, budgets, calls, interrupts, faults, changes of files and threads, all drawn from one seed.

    python -m tests.soak --minutes 5 --seed 1 [--device cuda] [--session 17]

`sessions.py` has what one session does; `actions.py` what it may draw; `subject.py` what is checked after each action.
"""
