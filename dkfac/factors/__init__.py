"""From batch statistics to running factors: sums over ranks, batch factors, averages; the state of a layer."""
