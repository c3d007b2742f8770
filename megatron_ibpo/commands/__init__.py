"""The commands of `ibpo`, one file each; no other module imports them."""
