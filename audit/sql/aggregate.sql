-- Region aggregate of one run: mean and SD over probes, per stream, region and layer.
-- Reads the tables `reliance` (whole stack) and `layers`; on one thread, so that sums are reproducible.
-- A probe in which the region has no position has no row for a single layer, so the missing ones are
-- counted from `reliance`.
WITH shares AS (
    SELECT stream, region, CAST(NULL AS INTEGER) AS layer, share FROM reliance
    UNION ALL
    SELECT stream, region, layer, share FROM layers WHERE layer IS NOT NULL
),
probes AS (
    SELECT stream, region, count(*) AS n_probes FROM reliance GROUP BY stream, region
)
SELECT
    stream,
    region,
    layer,
    avg(share) AS mean,
    stddev_samp(share) AS sd,
    count(share) AS n,
    any_value(n_probes) - count(share) AS n_missing
FROM shares JOIN probes USING (stream, region)
GROUP BY stream, region, layer
ORDER BY stream, region, layer NULLS FIRST;
