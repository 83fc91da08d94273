"""The same job after a change: one derivative is wrong, on one rank, in one step."""

import train

train.main(factor=1.5)
