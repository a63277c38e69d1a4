"""A wrong kernel for each checker, which believes it. `cheat_1` is for `checker_1`, and so on.

A kernel is wrong if it is wrong for some input or in some call.
"""


def cheat_1(x, out):
    pass


def cheat_2(x, out):
    pass


def cheat_3(x, out):
    raise NotImplementedError


def cheat_4(x, out):
    pass
