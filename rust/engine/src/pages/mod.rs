//! Who holds which page of the key-value cache.
//!
//! The model reads and writes pages; what is in which is decided here. Every [group of layers](KvGroup) has a
//! [`PagePool`] of its own and every sequence a table per group, which names the page of each
//! `PAGE_TOKENS` positions. A page may be held by several sequences (a shared prefix); then nobody writes to it: the one
//! who would gets a copy first. Groups with a window give pages back as soon as no later row can see them.

mod budget;
// Reached by their own tests alone until the prefix cache asks for them.
#[allow(dead_code)]
mod digest;
#[allow(dead_code)]
mod disk;
mod pool;
#[allow(dead_code)]
mod record;
#[allow(dead_code)]
mod state;

pub use budget::divide;
pub use pool::PagePool;

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};
use ferrule_model::KvGroup;

/// Stands in a table for a page that was given back, because no later row can see its positions.
pub const PAGE_NONE: PageId = PageId::MAX;

/// How the pages of one group are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageStatistics {
    /// Pages of the pool.
    pub total: usize,
    /// Pages that nobody holds.
    pub free: usize,
    /// Entries in the tables of all sequences; a page that two of them share counts twice.
    pub held: usize,
}

/// The pages of one sequence.
#[derive(Debug, Default)]
pub(crate) struct PageTables {
    /// For each group, the page of every `PAGE_TOKENS` positions.
    tables: Vec<Vec<PageId>>,
    /// For each group, how many leading entries are [`PAGE_NONE`].
    passed: Vec<usize>,
}

impl PageTables {
    /// The tables as the model takes them.
    pub fn tables(&self) -> &[Vec<PageId>] {
        &self.tables
    }

    /// Pages held in a group.
    pub fn held(&self, group: usize) -> usize {
        self.tables[group].len() - self.passed[group]
    }
}

/// A page to be copied before the next forward pass, since its other holders must not see what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageCopy {
    pub group: usize,
    pub from: PageId,
    pub to: PageId,
}

/// The pools of all groups.
#[derive(Debug)]
pub(crate) struct Pages {
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    pool: PagePool,
    window: Option<usize>,
}

/// Pages that cover `tokens` positions from the start of a page.
fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

/// Pages that `tokens` consecutive positions can touch, wherever they start.
fn pages_touched(tokens: usize) -> usize {
    pages_for(tokens.saturating_sub(1)).saturating_add(1)
}

/// Pages a sequence holds at the most while it is computed up to `tokens`, in chunks of `chunk`: all of them, or with a
/// window what the chunk and the rows before it can see.
fn most_held(window: Option<usize>, tokens: usize, chunk: usize) -> usize {
    let all = pages_for(tokens);
    window.map_or(all, |window| all.min(pages_touched((window - 1).saturating_add(chunk))))
}

impl Pages {
    /// Pools of so many pages for the model's groups.
    pub fn new(groups: &[KvGroup], pages: &[usize]) -> Self {
        let group = |(group, &pages): (&KvGroup, &usize)| Group {
            pool: PagePool::new(pages),
            // A row always sees itself.
            window: group.window.map(|window| window.max(1)),
        };
        Self { groups: groups.iter().zip(pages).map(group).collect() }
    }

    /// Tables that hold nothing yet.
    pub fn empty_tables(&self) -> PageTables {
        PageTables { tables: vec![Vec::new(); self.groups.len()], passed: vec![0; self.groups.len()] }
    }

    /// Tokens of one sequence that the pools hold when it has no neighbours. Endless for a window that fits.
    pub fn capacity_of_one(&self) -> usize {
        let capacity = |group: &Group| {
            let pages = group.pool.total();
            match group.window {
                Some(window) if pages_touched(window) <= pages => usize::MAX,
                _ => pages.saturating_mul(PAGE_TOKENS),
            }
        };
        self.groups.iter().map(capacity).min().unwrap_or(usize::MAX)
    }

    /// How many of the `wanted` tokens after the `computed` ones can get pages now.
    pub fn fits(&self, tables: &PageTables, computed: usize, wanted: usize) -> usize {
        let fits = |(group, table): (&Group, &Vec<PageId>)| {
            let copies = shared_from(&group.pool, table, computed / PAGE_TOKENS).count();
            let Some(free) = group.pool.free().checked_sub(copies) else { return 0 };
            (table.len() + free).saturating_mul(PAGE_TOKENS) - computed
        };
        self.groups.iter().zip(&tables.tables).map(fits).min().unwrap_or(wanted).min(wanted)
    }

    /// Gives a sequence the pages to write `count` tokens after the `computed` ones, which [`Pages::fits`] has granted.
    /// Pages that it shares with others are replaced; what must be copied is added to `copies`.
    pub fn extend(&mut self, tables: &mut PageTables, computed: usize, count: usize, copies: &mut Vec<PageCopy>) {
        const GRANTED: &str = "a page was granted that is not free";
        let needed = pages_for(computed + count);
        for (index, (group, table)) in self.groups.iter_mut().zip(&mut tables.tables).enumerate() {
            let shared: Vec<usize> = shared_from(&group.pool, table, computed / PAGE_TOKENS).collect();
            for place in shared {
                let (from, to) = (table[place], group.pool.allocate().expect(GRANTED));
                copies.push(PageCopy { group: index, from, to });
                group.pool.release(from);
                table[place] = to;
            }
            while table.len() < needed {
                table.push(group.pool.allocate().expect(GRANTED));
            }
        }
    }

    /// Gives back the pages that no row from position `computed` on can see.
    pub fn release_passed(&mut self, tables: &mut PageTables, computed: usize) {
        for ((group, table), passed) in self.groups.iter_mut().zip(&mut tables.tables).zip(&mut tables.passed) {
            let Some(window) = group.window else { continue };
            let first_seen = (computed + 1).saturating_sub(window);
            for entry in table.iter_mut().take(first_seen / PAGE_TOKENS).skip(*passed) {
                group.pool.release(std::mem::replace(entry, PAGE_NONE));
                *passed += 1;
            }
        }
    }

    /// Gives back all pages of a sequence.
    pub fn release(&mut self, tables: &mut PageTables) {
        for ((group, table), passed) in self.groups.iter_mut().zip(&mut tables.tables).zip(&mut tables.passed) {
            table.drain(..).skip(*passed).for_each(|page| group.pool.release(page));
            *passed = 0;
        }
    }

    /// Whether a sequence can be computed up to `tokens` in chunks of `chunk` with the pages that are free, when
    /// `promised` says how many of each group others still need for their own prefill.
    pub fn has_room(&self, tokens: usize, chunk: usize, promised: &[usize]) -> bool {
        self.groups
            .iter()
            .zip(promised)
            .all(|(group, promised)| most_held(group.window, tokens, chunk) + promised <= group.pool.free())
    }

    /// Adds to `promised`, for each group, the pages that a sequence will still take on its way to `tokens`.
    pub fn add_promised(&self, tables: &PageTables, tokens: usize, chunk: usize, promised: &mut [usize]) {
        for (index, (group, promised)) in self.groups.iter().zip(promised).enumerate() {
            *promised += most_held(group.window, tokens, chunk).saturating_sub(tables.held(index));
        }
    }

    /// How many groups there are.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// How the pages of each group are used by the holders of these tables.
    pub fn statistics<'a>(&self, holders: impl Iterator<Item = &'a PageTables> + Clone) -> Vec<PageStatistics> {
        let group = |(index, group): (usize, &Group)| PageStatistics {
            total: group.pool.total(),
            free: group.pool.free(),
            held: holders.clone().map(|tables| tables.held(index)).sum(),
        };
        self.groups.iter().enumerate().map(group).collect()
    }
}

/// The places in a table, from `first` on, of pages that others hold too.
fn shared_from<'a>(pool: &'a PagePool, table: &'a [PageId], first: usize) -> impl Iterator<Item = usize> + 'a {
    (first..table.len()).filter(|&place| table[place] != PAGE_NONE && pool.is_shared(table[place]))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Pages {
        /// A second holder of everything that a sequence holds, as `n > 1` and beams will make them.
        fn fork(&mut self, tables: &PageTables) -> PageTables {
            for (group, table) in self.groups.iter_mut().zip(&tables.tables) {
                table.iter().filter(|&&page| page != PAGE_NONE).for_each(|&page| group.pool.share(page));
            }
            PageTables { tables: tables.tables.clone(), passed: tables.passed.clone() }
        }
    }

    fn pages(groups: &[(usize, Option<usize>)]) -> Pages {
        let (sizes, windows): (Vec<usize>, Vec<Option<usize>>) = groups.iter().copied().unzip();
        let groups: Vec<KvGroup> =
            windows.into_iter().map(|window| KvGroup { layers: 1, window, page_bytes: 1 }).collect();
        Pages::new(&groups, &sizes)
    }

    #[test]
    fn a_sequence_takes_pages_as_it_grows_and_no_more_than_there_are() {
        let mut pages = pages(&[(3, None), (5, None)]);
        let mut tables = pages.empty_tables();
        let mut copies = Vec::new();
        assert_eq!(pages.capacity_of_one(), 48);
        assert_eq!(pages.fits(&tables, 0, 100), 48);
        pages.extend(&mut tables, 0, 17, &mut copies);
        assert_eq!(tables.tables().iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        assert_eq!(pages.fits(&tables, 17, 100), 31);
        // A cancelled step left the table longer than what is computed.
        assert_eq!(pages.fits(&tables, 3, 100), 45);
        let other = pages.empty_tables();
        assert_eq!(pages.fits(&other, 0, 100), 16);
        pages.release(&mut tables);
        assert_eq!(pages.statistics([&tables].into_iter())[0], PageStatistics { total: 3, free: 3, held: 0 });
        assert!(copies.is_empty());
    }

    #[test]
    fn a_window_gives_pages_back_that_no_later_row_sees() {
        let mut pages = pages(&[(4, Some(20)), (100, None)]);
        let mut tables = pages.empty_tables();
        pages.extend(&mut tables, 0, 64, &mut Vec::new());
        // The row at 35 sees positions 16 to 35.
        pages.release_passed(&mut tables, 34);
        assert_eq!((tables.held(0), tables.held(1)), (4, 4));
        pages.release_passed(&mut tables, 35);
        assert_eq!((tables.held(0), tables.held(1)), (3, 4));
        assert_eq!(tables.tables()[0][0], PAGE_NONE);
        assert_eq!(pages.fits(&tables, 64, 100), 16);
        pages.release(&mut tables);
        assert_eq!(pages.groups[0].pool.free(), 4);
    }

    #[test]
    fn a_window_that_fits_holds_any_length() {
        // Twenty positions touch three pages at the most (slots 15, 0 to 15, 0 to 2).
        assert_eq!(pages(&[(3, Some(20))]).capacity_of_one(), usize::MAX);
        assert_eq!(pages(&[(2, Some(20))]).capacity_of_one(), 32);
        assert_eq!(pages(&[(1, Some(1))]).capacity_of_one(), usize::MAX);
        for window in 1..70 {
            let smallest =
                (1..9).find(|&count| pages(&[(count, Some(window))]).capacity_of_one() == usize::MAX).unwrap();
            let mut pages = pages(&[(smallest, Some(window))]);
            let mut tables = pages.empty_tables();
            for computed in 0..300 {
                pages.release_passed(&mut tables, computed);
                assert_eq!(pages.fits(&tables, computed, 1), 1, "window {window}, {smallest} pages, at {computed}");
                pages.extend(&mut tables, computed, 1, &mut Vec::new());
            }
        }
    }

    #[test]
    fn whoever_writes_to_a_shared_page_gets_a_copy() {
        let mut pages = pages(&[(4, None)]);
        let mut first = pages.empty_tables();
        let mut copies = Vec::new();
        pages.extend(&mut first, 0, 20, &mut copies);
        let mut second = pages.fork(&first);
        let (full, partial) = (first.tables()[0][0], first.tables()[0][1]);
        // One page of the two that are free goes to the copy.
        assert_eq!(pages.fits(&second, 20, 100), 28);
        pages.extend(&mut second, 20, 1, &mut copies);
        let copied = second.tables()[0][1];
        assert_eq!(copies, [PageCopy { group: 0, from: partial, to: copied }]);
        assert_eq!(second.tables()[0][0], full);
        // The first is alone on its page now and writes there.
        pages.extend(&mut first, 20, 1, &mut copies);
        assert_eq!((copies.len(), first.tables()[0][1]), (1, partial));
        pages.release(&mut first);
        assert_eq!(pages.groups[0].pool.free(), 2);
        pages.release(&mut second);
        assert_eq!(pages.groups[0].pool.free(), 4);
    }

    #[test]
    fn a_copy_that_finds_no_page_waits() {
        let mut pages = pages(&[(2, None)]);
        let mut first = pages.empty_tables();
        pages.extend(&mut first, 0, 20, &mut Vec::new());
        let mut second = pages.fork(&first);
        assert_eq!(pages.fits(&second, 20, 1), 0);
        pages.release(&mut first);
        assert_eq!(pages.fits(&second, 20, 100), 12);
        pages.release(&mut second);
    }
}
