use ferrule_model::GroupKind;

use super::*;

fn pages(groups: &[(usize, Option<usize>)]) -> KvCacheManager {
    let (sizes, windows): (Vec<usize>, Vec<Option<usize>>) = groups.iter().copied().unzip();
    let groups: Vec<KvGroup> = windows
        .into_iter()
        .map(|window| KvGroup { layers: 1, kind: GroupKind::Pages { window }, page_bytes: 1 })
        .collect();
    KvCacheManager::new(&groups, &sizes, true)
}

#[test]
fn a_growing_sequence_allocates_pages_until_none_is_free() {
    let mut pages = pages(&[(3, None), (5, None)]);
    let mut tables = pages.private_tables();
    let mut copies = Vec::new();
    assert_eq!(pages.tokens_of_one_sequence(), 48);
    assert_eq!(pages.allocatable_slots(&tables, 0, 100), 48);
    pages.allocate_slots(&mut tables, 0, 17, &mut copies);
    assert_eq!(tables.tables().iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    assert_eq!(pages.allocatable_slots(&tables, 17, 100), 31);
    // A cancelled step leaves the table longer than the computed tokens.
    assert_eq!(pages.allocatable_slots(&tables, 3, 100), 45);
    let other = pages.private_tables();
    assert_eq!(pages.allocatable_slots(&other, 0, 100), 16);
    pages.release(&mut tables);
    assert_eq!(pages.statistics()[0], PageStatistics { total: 3, free: 3, cached: 0 });
    assert!(copies.is_empty());
}

#[test]
fn pages_outside_the_window_are_released() {
    let mut pages = pages(&[(4, Some(20)), (100, None)]);
    let mut tables = pages.private_tables();
    pages.allocate_slots(&mut tables, 0, 64, &mut Vec::new());
    // The row at 35 attends to positions 16 to 35.
    pages.release_out_of_window(&mut tables, 34);
    assert_eq!((tables.held(0), tables.held(1)), (4, 4));
    pages.release_out_of_window(&mut tables, 35);
    assert_eq!((tables.held(0), tables.held(1)), (3, 4));
    assert_eq!(tables.tables()[0][0], PAGE_NONE);
    assert_eq!(pages.allocatable_slots(&tables, 64, 100), 16);
    pages.release(&mut tables);
    assert_eq!(pages.groups[0].pool.free(), 4);
}

#[test]
fn a_pool_that_holds_the_window_holds_any_length() {
    // Twenty positions touch at most three pages (slots 15, 0 to 15, 0 to 2).
    assert_eq!(pages(&[(3, Some(20))]).tokens_of_one_sequence(), usize::MAX);
    assert_eq!(pages(&[(2, Some(20))]).tokens_of_one_sequence(), 32);
    assert_eq!(pages(&[(1, Some(1))]).tokens_of_one_sequence(), usize::MAX);
    // Miri is too slow for all.
    for window in (1..70).step_by(if cfg!(miri) { 23 } else { 1 }) {
        let smallest =
            (1..9).find(|&count| pages(&[(count, Some(window))]).tokens_of_one_sequence() == usize::MAX).unwrap();
        let mut pages = pages(&[(smallest, Some(window))]);
        let mut tables = pages.private_tables();
        for computed in 0..300 {
            pages.release_out_of_window(&mut tables, computed);
            assert_eq!(
                pages.allocatable_slots(&tables, computed, 1),
                1,
                "window {window}, {smallest} pages, at {computed}"
            );
            pages.allocate_slots(&mut tables, computed, 1, &mut Vec::new());
        }
    }
}

#[test]
fn shared_pages_are_copied_on_write() {
    let mut pages = pages(&[(4, None)]);
    let mut first = pages.private_tables();
    let mut copies = Vec::new();
    pages.allocate_slots(&mut first, 0, 20, &mut copies);
    let mut second = pages.private_tables();
    assert!(pages.fork(&mut second, &first, 20));
    let (full, partial) = (first.tables()[0][0], first.tables()[0][1]);
    // One of the two free pages is used for the copy.
    assert_eq!(pages.allocatable_slots(&second, 20, 100), 28);
    pages.allocate_slots(&mut second, 20, 1, &mut copies);
    let copied = second.tables()[0][1];
    assert_eq!(copies, [PageMove::Copy(PageCopy { group: 0, from: partial, to: copied })]);
    assert_eq!(second.tables()[0][0], full);
    // The first sequence is now the only holder and writes in place.
    pages.allocate_slots(&mut first, 20, 1, &mut copies);
    assert_eq!((copies.len(), first.tables()[0][1]), (1, partial));
    pages.release(&mut first);
    assert_eq!(pages.groups[0].pool.free(), 2);
    pages.release(&mut second);
    assert_eq!(pages.groups[0].pool.free(), 4);
}

#[test]
fn copy_on_write_waits_for_a_free_page() {
    let mut pages = pages(&[(2, None)]);
    let mut first = pages.private_tables();
    pages.allocate_slots(&mut first, 0, 20, &mut Vec::new());
    let mut second = pages.private_tables();
    assert!(pages.fork(&mut second, &first, 20));
    assert_eq!(pages.allocatable_slots(&second, 20, 1), 0);
    pages.release(&mut first);
    assert_eq!(pages.allocatable_slots(&second, 20, 100), 12);
    pages.release(&mut second);
}

#[test]
fn a_cached_page_is_written_in_place_if_no_page_is_free_for_a_copy() {
    for window in [None, Some(40)] {
        let mut pages = pages(&[(2, window)]);
        let mut first = pages.tables(Namespace::default(), usize::MAX);
        pages.allocate_slots(&mut first, 0, 32, &mut Vec::new());
        pages.cache_full_pages(&mut first, &[7; 32], 32, 32);
        let mut second = pages.private_tables();
        assert!(pages.fork(&mut second, &first, 20));
        assert_eq!(pages.allocatable_slots(&second, 20, 1), 0, "the other holds it");
        pages.release(&mut first);
        assert_eq!(pages.allocatable_slots(&second, 20, 100), 12);
        let mut moves = Vec::new();
        pages.allocate_slots(&mut second, 20, 12, &mut moves);
        assert!(moves.is_empty());
        pages.release(&mut second);
        assert_eq!(pages.statistics()[0], PageStatistics { total: 2, free: 2, cached: 1 });
        assert_eq!(pages.audit([].iter()), Ok(()));
    }
}
