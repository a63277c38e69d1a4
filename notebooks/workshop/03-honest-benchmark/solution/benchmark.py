"""How many times as fast is engine "b" as engine "a", per token, not counting the first run of each?

Both run once before anything counts. Then they take turns, in changing order, each time with a new prompt and long
texts. The time of a turn is divided by the tokens that were made. The result is the median of the turns' ratios, so a
few disturbed turns do not matter, and a machine that becomes slower is as slow for both sides of a turn.
"""

from statistics import median

TURNS, TOKENS = 21, 64


def measure(machine) -> float:
    for engine in ("a", "b"):
        per_token(machine, engine, 0)
    ratios = []
    for turn in range(1, TURNS + 1):
        seconds = {}
        for engine in ("a", "b") if turn % 2 else ("b", "a"):
            seconds[engine] = per_token(machine, engine, turn)
        ratios.append(seconds["a"] / seconds["b"])
    return median(ratios)


def per_token(machine, engine, prompt) -> float:
    """Seconds of a token."""
    begin = machine.clock()
    machine.start(engine, prompt, TOKENS)
    made = machine.wait(engine)
    return (machine.clock() - begin) / made
