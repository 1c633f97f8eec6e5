//! Divides the KV cache memory among groups of layers with different page sizes and windows.

use ferrule_model::KvGroup;

use super::{capacity, max_pages_held, pages_touched, states};
use crate::ConfigError;

/// Returns the maximum bytes of keys and values of one sequence of `tokens` tokens, computed in chunks of `chunk`: of
/// all tokens, or with a window of the tokens that the chunk attends to.
#[must_use]
pub fn bytes_of_one(groups: &[KvGroup], tokens: usize, chunk: usize) -> u64 {
    let pages = |group: &KvGroup| match group.is_state() {
        true => states::PER_STEP,
        false => max_pages_held(group.window(), tokens, chunk),
    };
    let bytes = |group: &KvGroup| group.page_bytes.saturating_mul(pages(group) as u64);
    groups.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Returns how many tokens of a single sequence the pools hold; unlimited if all windows fit.
#[must_use]
pub fn tokens_of_one(groups: &[KvGroup], pages: &[usize]) -> usize {
    let tokens = |(group, &pages): (&KvGroup, &usize)| match group.is_state() {
        true => states::capacity(pages),
        false => capacity(group.window(), pages),
    };
    groups.iter().zip(pages).map(tokens).min().unwrap_or(usize::MAX)
}

/// Divides `budget` bytes among the page pools of the groups, so that they run out together when every sequence is
/// `max_model_len` tokens long, and no pool is larger than `max_num_seqs` such sequences need. `chunk` is the maximum
/// number of tokens of a sequence in one step (`max_num_batched_tokens`).
///
/// # Examples
/// ```
/// use ferrule_engine::pages::divide;
/// use ferrule_model::{GroupKind, KvGroup};
///
/// let groups = [KvGroup { layers: 16, kind: GroupKind::Pages { window: None }, page_bytes: 1 << 20 }];
/// // 64 MiB hold 64 pages of 16 tokens.
/// assert_eq!(divide(&groups, 64 << 20, 4096, 8, 512).unwrap(), [64]);
/// ```
///
/// # Errors
/// Returns [`ConfigError::KvBudget`] if not even one page of context fits.
pub fn divide(
    groups: &[KvGroup],
    budget: u64,
    max_model_len: usize,
    max_num_seqs: usize,
    chunk: usize,
) -> Result<Vec<usize>, ConfigError> {
    let need = groups.iter().map(|group| match group.is_state() {
        true => states::PER_SEQUENCE,
        false => max_pages_held(group.window(), max_model_len, chunk).max(1),
    });
    let need: Vec<usize> = need.collect();
    let bytes_of = |pages: &[usize]| -> u128 {
        groups.iter().zip(pages).map(|(group, &pages)| u128::from(group.page_bytes) * pages as u128).sum()
    };
    // Minimum: one page per group, the pages of a window, or the states of a step.
    let least: Vec<usize> = groups
        .iter()
        .zip(&need)
        .map(|(group, &need)| match group.is_state() {
            true => states::PER_STEP,
            false => group.window().map_or(1, |window| need.min(pages_touched(window.max(1)))),
        })
        .collect();
    let needed = bytes_of(&least);
    if needed > u128::from(budget) {
        return Err(ConfigError::KvBudget { budget, needed: u64::try_from(needed).unwrap_or(u64::MAX) });
    }
    let for_one = bytes_of(&need).max(1);
    // A budget that holds one long sequence is divided as such sequences need it.
    let (least, left) = match u128::from(budget).checked_sub(for_one) {
        Some(left) => (&need, left),
        None => (&least, u128::from(budget) - needed),
    };
    let most = |need: usize| (need as u128).saturating_mul(max_num_seqs as u128).min(u128::from(u32::MAX - 1));
    let shares = need.iter().zip(least).map(|(&need, &least)| {
        // Memory beyond the minimum is divided in proportion to the pages of a long sequence.
        let share = least as u128 + left.saturating_mul(need as u128) / for_one;
        share.min(most(need)) as usize
    });
    Ok(shares.collect())
}

#[cfg(test)]
mod tests {
    use ferrule_model::GroupKind;

    use super::*;

    fn group(window: Option<usize>, page_bytes: u64) -> KvGroup {
        KvGroup { layers: 1, kind: GroupKind::Pages { window }, page_bytes }
    }

    #[test]
    fn one_group_gets_the_whole_budget_up_to_what_it_can_use() {
        assert_eq!(divide(&[group(None, 100)], 1099, 1600, 4, 512), Ok(vec![10]));
        assert_eq!(divide(&[group(None, 100)], u64::MAX, 1600, 4, 512), Ok(vec![400]));
        assert_eq!(
            divide(&[group(None, 100)], 99, 1600, 4, 512),
            Err(ConfigError::KvBudget { budget: 99, needed: 100 })
        );
        assert_eq!(divide(&[group(None, 0)], 0, 1600, 1, 512), Ok(vec![1]));
    }

    #[test]
    fn bytes_of_one_sequence_hold_exactly_one_sequence() {
        for (window, held) in [(None, 100), (Some(40), 36), (Some(4000), 100)] {
            let groups = [group(None, 1000), group(window, 5000)];
            let bytes = bytes_of_one(&groups, 1600, 512);
            assert_eq!(bytes, 100 * 1000 + held * 5000, "{window:?}");
            let tokens = |budget| tokens_of_one(&groups, &divide(&groups, budget, 1600, 4, 512).unwrap());
            assert_eq!(tokens(bytes), 1600, "{window:?}");
            assert!((1..1600).contains(&tokens(bytes - 1)), "{window:?}");
        }
    }

    #[test]
    fn groups_share_the_budget_in_proportion_to_a_long_sequence() {
        let groups = [group(None, 1000), group(Some(128), 5000)];
        for budget in [60_000_u64, 200_000, 1_000_000, 10_000_000] {
            let pages = divide(&groups, budget, 4096, 64, 64).unwrap();
            let bytes = pages[0] as u64 * 1000 + pages[1] as u64 * 5000;
            assert!(bytes <= budget, "{budget}: {pages:?}");
            assert!(bytes * 100 >= budget * 85, "{budget}: {pages:?}");
            assert!(pages[1] >= 9, "the window fits: {pages:?}");
        }
        assert!(divide(&groups, 40_000, 4096, 64, 64).is_err());
    }
}
