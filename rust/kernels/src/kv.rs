//! The key-value cache in pages.

/// Tokens of a page: one vector of lanes, so that a page's scores come out of one register per head.
pub const PAGE_TOKENS: usize = crate::arch::LANES;

/// A page of a [`KvStore`]; the same number names the page in every layer of the group.
pub type PageId = u32;
