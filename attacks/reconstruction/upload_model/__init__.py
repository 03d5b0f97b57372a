"""How an upload came about, as the adversary models it, and the victims that attacks work on."""
