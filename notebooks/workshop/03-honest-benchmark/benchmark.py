"""How many times as fast is engine "b" as engine "a", per token, not counting the first run of each?

`machine` is a computer that is simulated, with a clock of its own:

    machine.clock()                        seconds, like time.perf_counter(); it ticks once in a millisecond
    machine.start(engine, prompt, tokens)  begins to generate: `prompt` is a number that stands for a text
    machine.wait(engine)                   waits until the engine is done; returns how many tokens it has made

Real machines have every habit that this one may have. Some engines compile something when they first run, some remember
prompts, some end a text early. Some machines become slower while they get warm, and other programs disturb them. A
generation has at most 64 tokens.

This benchmark prints impressive numbers. Make it right on every machine, within 3 %. It has ten minutes of the
machine's time, and 20,000 calls of the machine's functions.
"""


def measure(machine) -> float:
    seconds = {}
    for engine in ("a", "b"):
        begin = machine.clock()
        machine.start(engine, 1, 32)
        seconds[engine] = machine.clock() - begin
    return seconds["a"] / max(seconds["b"], 1e-9)
