//! Divides the KV cache memory among groups of layers with different page sizes and windows.

use ferrule_model::KvGroup;

use super::{capacity, max_pages_held, pages_touched, states};
use crate::ConfigError;

/// Returns the maximum bytes of sequence memory of one sequence of `tokens` tokens, computed in chunks of `chunk`: keys
/// and values of all tokens, or with a window of the tokens that the chunk attends to, and states with snapshots.
#[must_use]
pub fn bytes_of_one(groups: &[KvGroup], tokens: usize, chunk: usize) -> u64 {
    let pages = |group: &KvGroup| match group.is_state() {
        true => states::PER_SEQUENCE,
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
/// number of tokens of a sequence in one step (`max_num_batched_tokens`). Groups of state get a quarter of the budget, if
/// they can use it, since the number of states does not depend on the length of the sequences.
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
/// Returns [`ConfigError::KvBudget`] if not even one page of context, and the states of one step, fit.
pub fn divide(
    groups: &[KvGroup],
    budget: u64,
    max_model_len: usize,
    max_num_seqs: usize,
    chunk: usize,
) -> Result<Vec<usize>, ConfigError> {
    let budget_bytes = u128::from(budget);
    let (states, paged): (Vec<&KvGroup>, Vec<&KvGroup>) = groups.iter().partition(|group| group.is_state());
    let need: Vec<usize> =
        paged.iter().map(|group| max_pages_held(group.window(), max_model_len, chunk).max(1)).collect();
    // Minimum: one page per group, or the pages of a window.
    let least: Vec<usize> = paged
        .iter()
        .zip(&need)
        .map(|(group, &need)| group.window().map_or(1, |window| need.min(pages_touched(window.max(1)))))
        .collect();
    let bytes_of = |pages: &[usize]| -> u128 {
        paged.iter().zip(pages).map(|(group, &pages)| u128::from(group.page_bytes) * pages as u128).sum()
    };
    let state_bytes: u128 = states.iter().map(|group| u128::from(group.page_bytes)).sum();
    let (least_bytes, for_one) = (bytes_of(&least), bytes_of(&need));
    let needed = least_bytes + states::PER_STEP as u128 * state_bytes;
    if needed > budget_bytes {
        return Err(ConfigError::KvBudget { budget, needed: u64::try_from(needed).unwrap_or(u64::MAX) });
    }
    let most = |need: usize| (need as u128).saturating_mul(max_num_seqs as u128).min(u128::from(u32::MAX - 1));
    let count = states_in(budget_bytes, state_bytes, (least_bytes, for_one)).min(most(states::PER_SEQUENCE));
    let for_pages = budget_bytes - count * state_bytes;
    // A budget that holds one long sequence is divided as such sequences need it.
    let (least, left) = match for_pages.checked_sub(for_one.max(1)) {
        Some(left) => (&need, left),
        None => (&least, for_pages - least_bytes),
    };
    let mut shares = need.iter().zip(least).map(|(&need, &least)| {
        // Memory beyond the minimum is divided in proportion to the pages of a long sequence.
        let share = least as u128 + left.saturating_mul(need as u128) / for_one.max(1);
        share.min(most(need)) as usize
    });
    let pages = groups.iter().map(|group| if group.is_state() { Some(count as usize) } else { shares.next() });
    Ok(pages.map(|pages| pages.expect("every group of pages has a share")).collect())
}

/// Returns how many states of `state_bytes` get a part of a budget whose groups of pages need `least` bytes and hold one
/// long sequence in `for_one` bytes: those of one sequence, and a quarter of the budget for snapshots and more
/// sequences. A budget that holds one long sequence with its snapshots does so.
fn states_in(budget: u128, state_bytes: u128, (least, for_one): (u128, u128)) -> u128 {
    let fitting = |bytes_of_pages: u128| (budget - bytes_of_pages).checked_div(state_bytes).unwrap_or(u128::MAX);
    let per_sequence = states::PER_SEQUENCE as u128;
    let (low, high) = match for_one + per_sequence * state_bytes <= budget {
        true => (per_sequence, fitting(for_one)),
        false => (states::PER_STEP as u128, fitting(least)),
    };
    let has_pages = for_one > 0;
    let quarter = (budget / 4).checked_div(state_bytes).unwrap_or(u128::MAX);
    if has_pages { quarter.saturating_add(states::PER_STEP as u128).clamp(low, high) } else { high }
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

    fn states(page_bytes: u64) -> KvGroup {
        KvGroup { layers: 1, kind: GroupKind::State, page_bytes }
    }

    #[test]
    fn large_states_leave_room_for_pages_and_a_snapshot() {
        const MB: u64 = 1_000_000;
        // 32 KB per token, and states of 50 MB.
        let groups = [group(None, MB / 2), states(50 * MB)];
        let divided = |budget| divide(&groups, budget * MB, 32_768, 64, 512);
        assert_eq!(divided(256), Ok(vec![212, 3]));
        assert_eq!(divided(101), Ok(vec![2, 2]));
        let error = divided(100).unwrap_err();
        assert_eq!(error, ConfigError::KvBudget { budget: 100 * MB, needed: 100 * MB + MB / 2 });
        assert!(error.to_string().contains("must be >= 100500000") && error.to_string().contains("got 100000000"));
        // States of several sequences with snapshots, although one sequence of the maximum length does not fit.
        assert_eq!(divided(1000), Ok(vec![1300, 7]));
        // No more than all sequences can use.
        assert_eq!(divided(1 << 20).unwrap()[1], 64 * 4);
    }

    #[test]
    fn bytes_of_one_sequence_with_states_hold_exactly_one_sequence() {
        for state_bytes in [10, 5000, 1_000_000] {
            let groups = [group(None, 1000), states(state_bytes)];
            let bytes = bytes_of_one(&groups, 1600, 512);
            assert_eq!(bytes, 100 * 1000 + 4 * state_bytes);
            let pages = divide(&groups, bytes, 1600, 4, 512).unwrap();
            assert_eq!((tokens_of_one(&groups, &pages), pages[1]), (1600, 4));
        }
        assert_eq!(divide(&[states(100)], 1099, 1600, 4, 512), Ok(vec![10]));
    }
}
