//! Division of a model into pipeline stages of about the same size.

use std::ops::Range;

use super::layers::{StageError, reads};
use crate::quantization::Quantization;
use crate::spec::ModelSpec;
use crate::weights::{LoadError, Loader, Source};

/// Divides the layers of a model into `stages` ranges, first to last, such that the largest stage has as few bytes of
/// weights as possible. The embedding and the lm_head do not count, because their rows are divided among all stages. Reads
/// only the headers of the files.
///
/// A stage begins only where no layer of it or of later stages reads anything of a layer before it, except for the
/// hidden states.
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
    let (layers, begins) = (spec.layers.len(), begins(spec));
    if stages == 0 || stages > begins.len() {
        return Err(StageError::Stages { stages, most: begins.len(), layers }.into());
    }
    let weights = Loader::new(spec, source, quantization).measure()?;
    let (beginning, output) = weights.bytes_outside_layers();
    let of_layers = weights.bytes_of_layers();
    // before[i]: bytes of the layers before layer i.
    let before: Vec<u64> = std::iter::once(0)
        .chain(of_layers.iter().scan(0, |sum, bytes| {
            *sum += bytes;
            Some(*sum)
        }))
        .collect();
    let bytes = |range: &Range<usize>| {
        let ends = [(range.start == 0, beginning), (range.end == layers, output)];
        let ends: u64 = ends.iter().filter(|(has, _)| *has).map(|(_, bytes)| bytes).sum();
        before[range.end] - before[range.start] + ends
    };
    Ok(smallest_maximum(&begins, layers, stages, &bytes))
}

/// Returns the layers at which a stage can begin, in order.
fn begins(spec: &ModelSpec) -> Vec<usize> {
    let mut begins = Vec::new();
    let mut first_read = usize::MAX; // the first layer that is read by a layer from here on
    for (index, layer) in spec.layers.iter().enumerate().rev() {
        first_read = reads(layer).map(|(owner, _)| owner).fold(first_read, usize::min);
        if first_read >= index {
            begins.push(index);
        }
    }
    begins.reverse();
    begins
}

/// Divides `0..end` into `parts` ranges that begin at some of `begins`, such that the largest `cost` is as small as
/// possible. The first of `begins` is 0, and there are at least `parts` of them. A range must cost at least as much as
/// each range within it.
fn smallest_maximum(
    begins: &[usize],
    end: usize,
    parts: usize,
    cost: &impl Fn(&Range<usize>) -> u64,
) -> Vec<Range<usize>> {
    let (mut low, mut high) = (0, cost(&(0..end)));
    while low < high {
        let limit = low + (high - low) / 2;
        match fill(begins, end, parts, limit, cost) {
            Some(_) => high = limit,
            None => low = limit + 1,
        }
    }
    fill(begins, end, parts, high, cost).expect("no range costs more than the whole")
}

/// Divides `0..end` as [`smallest_maximum`] does, into ranges that cost at most `limit` each; earlier ranges are as
/// long as possible. Returns `None` if there is no such division.
fn fill(
    begins: &[usize],
    end: usize,
    parts: usize,
    limit: u64,
    cost: &impl Fn(&Range<usize>) -> u64,
) -> Option<Vec<Range<usize>>> {
    let mut ranges = Vec::with_capacity(parts);
    let mut from = 0;
    for following in (0..parts).rev() {
        // At least one begin is left for each of the following ranges.
        let ends = from + 1..=begins.len() - following;
        let ranges_from_here = ends.map(|to| (to, begins[from]..begins.get(to).copied().unwrap_or(end)));
        let (to, range) = ranges_from_here.take_while(|(_, range)| cost(range) <= limit).last()?;
        ranges.push(range);
        from = to;
    }
    (from == begins.len()).then_some(ranges)
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
        let (falling, zeros) = ([20, 2, 2, 8, 3, 3, 7, 1, 1, 9], [0, 0, 5, 0, 0, 0, 5, 4, 0, 0]);
        let all_costs = [[9, 1, 1, 7, 3, 3, 8, 2, 2, 20], falling, zeros, [0; 10]];
        let all_ends = [(0, 0), (30, 0), (0, 30), (12, 25)];
        for (costs, ends) in all_costs.iter().flat_map(|costs| all_ends.map(|ends| (costs, ends))) {
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
    #[test]
    fn the_largest_models_are_divided_into_many_stages() {
        let begins: Vec<_> = (0..4096).collect();
        let cost = |range: &Range<usize>| range.len() as u64;
        for parts in [1, 2, 2048, 4096] {
            let ranges = smallest_maximum(&begins, 4096, parts, &cost);
            let layers = 4096 / parts;
            assert!(ranges.into_iter().eq((0..parts).map(|part| part * layers..(part + 1) * layers)));
        }
    }
}
