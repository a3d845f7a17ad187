"""Ways into attentions that others wrote, one file each: how they are found, and where one may stand in them."""
