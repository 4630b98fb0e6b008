"""Helper ranks (``dkfac.roles``): statistics and inverse workers beside the ranks that train."""
