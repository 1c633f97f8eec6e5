"""Names that `ferrule.ray` exports; `__init__.py` reads this list."""

from .predictor import LLMPredictor as LLMPredictor
from .processor import ProcessorConfig as ProcessorConfig
from .processor import build_processor as build_processor
from .serving import app_from_config as app_from_config
from .serving import build_app as build_app
