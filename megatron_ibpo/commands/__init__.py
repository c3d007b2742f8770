"""One file per command of `ibpo`; nothing imports them."""
