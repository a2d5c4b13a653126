"""Loggers that write metrics to a terminal, a file, TensorBoard, Weights & Biases."""

from nnx_parallel.loggers.console import ConsoleLogger as ConsoleLogger
from nnx_parallel.loggers.logger import JSONLinesLogger as JSONLinesLogger
from nnx_parallel.loggers.logger import Logger as Logger
from nnx_parallel.loggers.logger import LoggerGroup as LoggerGroup
from nnx_parallel.loggers.logger import TensorBoardLogger as TensorBoardLogger
from nnx_parallel.loggers.logger import WandbLogger as WandbLogger
from nnx_parallel.loggers.logger import default_loggers as default_loggers
