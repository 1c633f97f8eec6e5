"""LLM inference on CPUs.

    from ferrule import LLM, SamplingParams

    llm = LLM()  # the small model that ships with ferrule; or a directory, or "org/repo"
    print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)

Names are imported on first use, so that `import ferrule` is fast. `__init__.pyi` lists them.
"""

# lazy_loader has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
