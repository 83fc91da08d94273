"""The same job with its blocks under another name."""

import train

train.main(blocks="h")
