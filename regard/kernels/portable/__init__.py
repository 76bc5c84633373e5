from regard.problem import Problem


def supports(problem: Problem) -> str | None:
    return "not written yet"
