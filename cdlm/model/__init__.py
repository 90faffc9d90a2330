"""The network: a diffusion transformer, the denoiser around it, averages of its weights, its files."""

from cdlm.model.average import frozen_copy, update
from cdlm.model.denoiser import Denoiser
from cdlm.model.dit import SIZES, Architecture
from cdlm.model.pretrained import LayoutError, load, save

__all__ = ["SIZES", "Architecture", "Denoiser", "LayoutError", "frozen_copy", "load", "save", "update"]
