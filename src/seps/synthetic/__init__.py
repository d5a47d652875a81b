"""A synthetic RGB / NIR / TIR set of people; the rest of re-identification does not import it.

An identity is a code of independent attributes (`people.ATTRIBUTES`). Some are seen by one sensor alone: dyes and
prints by RGB; the fabric's reflectance and a trim of absorbing yarn by NIR, where clothes of different colour look
alike; insulation and warm spots by TIR, where carried things are cold. Build, legwear, bag and hat are seen by all. No
sensor alone tells all identities apart.

A camera fixes background, colour cast, gains, size and place of the figure and how often it is seen from the front,
back or side. A scene fixes light (every second one is night) and ambient warmth. Every shot adds pose, shading, noise,
clutter behind and occluders before the figure in the same colours, reflectances and heats as the identities, at times a
passer-by at the border who is nobody in the set, and regions in which one sensor is blind (deep shadow, glare; no lamp,
reflection; surroundings as warm as the figure, detector noise) while the others see.

`make_synthetic` writes `{train,query,gallery}/{RGB,NI,TI}/PPPP_cC_sS_NNN.jpg` (the generic layout) and `manifest.json`
with version, parameters and a digest of all files. The identities of train and test are disjoint; every query identity
has gallery shots from another camera. Files are the same byte for byte for the same parameters (and releases of numpy
and Pillow), whatever the number of workers.
"""

from seps.synthetic.files import VERSION, make_synthetic
from seps.synthetic.world import Look, Shot, SyntheticConfig, World, plan_shots

__all__ = ["VERSION", "Look", "Shot", "SyntheticConfig", "World", "make_synthetic", "plan_shots"]
