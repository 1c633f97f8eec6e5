//! Division of a model into pipeline stages of about the same size.

use std::ops::Range;

use super::layers::{StageError, StageLayers, reads};
use crate::quantization::Quantization;
use crate::spec::ModelSpec;
use crate::weights::{LoadError, Loader, Source};

/// Divides the layers of a model into `stages` ranges, first to last, such that the largest stage has as few bytes of
/// weights as possible. Reads only the headers of the files.
///
/// A stage begins only at a layer after which no layer reads anything of earlier layers but the hidden states.
///
/// # Errors
/// [`LoadError`] if the files do not fit the spec; [`StageError::Stages`] within it if the model cannot be divided into
/// so many stages.
pub fn divide_layers(
    spec: &ModelSpec,
    source: Source<'_>,
    quantization: Quantization,
    stages: usize,
) -> Result<Vec<Range<usize>>, LoadError> {
    let layers = spec.layers.len();
    let begins: Vec<usize> = (0..layers).filter(|begin| can_begin(spec, *begin)).collect();
    if stages == 0 || stages > begins.len() {
        return Err(StageError::Stages { stages, most: begins.len(), layers }.into());
    }
    let weights = Loader::new(spec, source, quantization).measure()?;
    let (embedding, output) = weights.bytes_of_ends();
    let of_layers = weights.bytes_of_layers();
    // before[i]: bytes of the layers before layer i.
    let before: Vec<u64> = std::iter::once(0)
        .chain(of_layers.iter().scan(0, |sum, bytes| {
            *sum += bytes;
            Some(*sum)
        }))
        .collect();
    let is_tied = StageLayers::whole(spec).has_tied_lm_head(spec);
    let bytes = |range: &Range<usize>| {
        let (is_first, is_last) = (range.start == 0, range.end == layers);
        let ends = [(is_first || (is_last && is_tied), embedding), (is_last, output)];
        let ends: u64 = ends.iter().filter(|(has, _)| *has).map(|(_, bytes)| bytes).sum();
        before[range.end] - before[range.start] + ends
    };
    Ok(smallest_maximum(&begins, layers, stages, &bytes))
}

/// Returns whether a stage can begin at layer `begin`, with any layer as its last.
fn can_begin(spec: &ModelSpec, begin: usize) -> bool {
    spec.layers[begin..].iter().flat_map(reads).all(|(owner, _)| owner >= begin)
}

/// Divides `0..end` into `parts` ranges that begin at some of `begins`, such that the largest `cost` is as small as
/// possible. The first of `begins` is 0, and there are at least `parts` of them.
fn smallest_maximum(
    begins: &[usize],
    end: usize,
    parts: usize,
    cost: &impl Fn(&Range<usize>) -> u64,
) -> Vec<Range<usize>> {
    // best[i]: the smallest maximum for begins[i].. in as many parts as there were rounds, with the end of the first
    // part.
    let place = |index: usize| begins.get(index).copied().unwrap_or(end);
    let mut rounds: Vec<Vec<Option<(u64, usize)>>> = Vec::with_capacity(parts);
    for round in 0..parts {
        let best = (0..begins.len()).map(|from| {
            if round == 0 {
                return Some((cost(&(begins[from]..end)), begins.len()));
            }
            let splits = (from + 1..begins.len()).filter_map(|to| {
                let (rest, _) = rounds[round - 1][to]?;
                Some((cost(&(begins[from]..begins[to])).max(rest), to))
            });
            splits.min()
        });
        let best = best.collect();
        rounds.push(best);
    }
    let mut from = 0;
    let ranges = rounds.iter().rev().map(|best| {
        let (_, to) = best[from].expect("there are at least as many begins as parts");
        let range = begins[from]..place(to);
        from = to;
        range
    });
    ranges.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the smallest maximum by trying all divisions.
    fn by_trial(begins: &[usize], end: usize, parts: usize, cost: &impl Fn(&Range<usize>) -> u64) -> u64 {
        if parts == 1 {
            return cost(&(begins[0]..end));
        }
        let splits = (1..=begins.len() + 1 - parts).filter(|to| *to < begins.len());
        let of_split = |to: usize| cost(&(begins[0]..begins[to])).max(by_trial(&begins[to..], end, parts - 1, cost));
        splits.map(of_split).min().unwrap()
    }

    #[test]
    fn no_other_division_has_a_smaller_maximum() {
        let costs = [9, 1, 1, 7, 3, 3, 8, 2, 2, 20];
        for ends in [(0, 0), (30, 0), (0, 30), (12, 25)] {
            let cost = |range: &Range<usize>| {
                let (first, last) = (range.start == 0, range.end == costs.len());
                costs[range.clone()].iter().sum::<u64>() + u64::from(first) * ends.0 + u64::from(last) * ends.1
            };
            for begins in [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9][..], &[0, 4, 5, 9], &[0]] {
                for parts in 1..=begins.len() {
                    let ranges = smallest_maximum(begins, costs.len(), parts, &cost);
                    assert!(ranges.len() == parts && ranges.iter().all(|range| begins.contains(&range.start)));
                    let bounds = ranges.iter().flat_map(|range| [range.start, range.end]).collect::<Vec<_>>();
                    assert!(bounds[0] == 0 && bounds[bounds.len() - 1] == costs.len());
                    assert!(bounds[1..bounds.len() - 1].chunks(2).all(|pair| pair[0] == pair[1]), "{ranges:?}");
                    let largest = ranges.iter().map(cost).max().unwrap();
                    assert_eq!(largest, by_trial(begins, costs.len(), parts, &cost), "{ranges:?}");
                }
            }
        }
    }
}
