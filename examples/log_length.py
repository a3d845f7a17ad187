from headwise.attention.interfaces import ScoreStep
from headwise.attention.interfaces.part import part


@part
class LogLength(ScoreStep):
    """s -> s log(i + 1), where query i attends to i + 1 keys: scalable softmax (2501.19399) with
    factor 1.
    """

    positional = True

    def score(self, s, position, factors, p):
        return s * (position.i + 1.0).log().to(s.dtype)
