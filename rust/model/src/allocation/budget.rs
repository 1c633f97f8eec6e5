//! Choosing one format for each of several groups of matrices, within a budget of bytes.

use std::collections::BinaryHeap;

/// Size and estimated loss of a group of matrices in one format.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Choice {
    pub bytes: u64,
    pub loss: f64,
}

/// Returns the index of the choice of each group. Starts with the first choices, which must fit the budget, and always
/// takes the wider choice that reduces the loss most per byte, as long as one fits.
///
/// Until a choice does not fit, this is the solution of the Lagrangian: no other of the same bytes has a smaller loss.
pub(super) fn choose(groups: &[Vec<Choice>], budget: u64) -> Vec<usize> {
    let mut chosen = vec![0; groups.len()];
    let mut left = budget - groups.iter().map(|choices| choices[0].bytes).sum::<u64>();
    // Upgrades of a group from one choice to another, by the loss that they save per byte. That is above zero, and the
    // bits of such numbers have the order of the numbers.
    let upgrades = |group: usize, from: usize| {
        let Choice { bytes, loss } = groups[group][from];
        let wider = groups[group].iter().enumerate().filter(move |(_, to)| to.bytes > bytes && to.loss < loss);
        wider.map(move |(to, choice)| {
            let saved = (loss - choice.loss) / (choice.bytes - bytes) as f64;
            (saved.to_bits(), group, to, from)
        })
    };
    let mut heap: BinaryHeap<_> = (0..groups.len()).flat_map(|group| upgrades(group, 0)).collect();
    while let Some((_, group, to, from)) = heap.pop() {
        let bytes = groups[group][to].bytes - groups[group][from].bytes;
        // What does not fit now does not fit later.
        if chosen[group] == from && bytes <= left {
            (chosen[group], left) = (to, left - bytes);
            heap.extend(upgrades(group, to));
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::RandomMatrix;

    /// Groups of three choices whose losses fall as bytes grow.
    fn groups(seed: &str, count: usize) -> Vec<Vec<Choice>> {
        let mut numbers = vec![0.0; 6 * count];
        RandomMatrix::new(seed, 1).read_row(0, &mut numbers);
        let peak = 1.01 * numbers.iter().fold(0.0, |peak: f32, x| peak.max(x.abs()));
        let groups = numbers.chunks_exact(6).map(|numbers| {
            let (mut bytes, mut loss) = (0, 1000.0);
            let choices = numbers.chunks_exact(2).map(|pair| {
                bytes += 1 + (pair[0].abs() / peak * 50.0) as u64;
                loss *= f64::from(pair[1].abs() / peak);
                Choice { bytes, loss }
            });
            choices.collect()
        });
        groups.collect()
    }

    fn total(groups: &[Vec<Choice>], chosen: &[usize]) -> (u64, f64) {
        let choices = groups.iter().zip(chosen).map(|(choices, chosen)| choices[*chosen]);
        choices.fold((0, 0.0), |(bytes, loss), choice| (bytes + choice.bytes, loss + choice.loss))
    }

    /// Returns the least loss within a budget by trying everything.
    fn least(groups: &[Vec<Choice>], budget: u64) -> f64 {
        let all = (0..3_usize.pow(groups.len() as u32)).map(|code| {
            let chosen: Vec<_> = (0..groups.len()).map(|group| code / 3_usize.pow(group as u32) % 3).collect();
            total(groups, &chosen)
        });
        all.filter(|(bytes, _)| *bytes <= budget).fold(f64::INFINITY, |least, (_, loss)| loss.min(least))
    }

    #[test]
    fn choices_are_optimal_except_for_the_bytes_of_one_upgrade() {
        for seed in ["a", "b", "c", "d", "e", "f"] {
            let groups = groups(seed, 6);
            let (narrowest, widest) = (total(&groups, &[0; 6]).0, total(&groups, &[2; 6]).0);
            let upgrade = groups.iter().map(|choices| choices[2].bytes - choices[0].bytes).max().unwrap();
            for budget in (narrowest..=widest + 3).step_by(7) {
                let (bytes, loss) = total(&groups, &choose(&groups, budget));
                assert!(bytes <= budget);
                assert!(loss <= least(&groups, budget.saturating_sub(upgrade)) + 1e-9, "{seed} {budget}");
            }
            assert_eq!(choose(&groups, widest), [2; 6]);
            assert_eq!(choose(&groups, narrowest), [0; 6]);
        }
    }
}
